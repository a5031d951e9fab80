"""What transformers understands of a layer config, against what was written."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_tools.drafter.checkpoint_view import rope_thetas

# Compared apart: transformers gathers every statement of the rotary base in rope_parameters.
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_NOT_COMPARED = (*_ROPE_KEYS, "architectures", "auto_map", "transformers_version", "_name_or_path")


def reread_differences(written: Mapping[str, Any]) -> list[str]:
    """Load a layer config through ``AutoConfig`` and name what comes back changed.

    transformers fills a missing theta with 10,000, a missing head_dim with 128, and a window without
    ``use_sliding_window`` with None, all without a word.

    Args:
        written: A config of ``model_type`` qwen3, with the layer sizes at the top level.

    Returns:
        One phrase per difference; empty if everything is understood as written.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(written)), encoding="utf-8")
        try:
            loaded = AutoConfig.from_pretrained(folder).to_dict()
        except (StrictDataclassError, ValueError, KeyError, TypeError) as error:
            return [f"transformers refuses it: {str(error).strip().splitlines()[-1].strip()}"]
    differences = [
        f"{key} written as {written[key]!r} loads as {loaded[key]!r}"
        for key in sorted(written.keys() & loaded.keys() - set(_NOT_COMPARED))
        if written[key] != loaded[key]
    ]
    if "head_dim" not in written:
        differences.append(f"head_dim is not written and loads as {loaded.get('head_dim')}")
    return differences + _rope_differences(written, loaded.get("rope_parameters") or {})


def _rope_differences(written: Mapping[str, Any], loaded: Mapping[str, Any]) -> list[str]:
    thetas = rope_thetas(written)
    understood = loaded.get("rope_theta")
    differences = [
        f"{key} written as {theta:g} loads as {understood:g}" for key, theta in thetas.items() if theta != understood
    ]
    if not thetas:
        differences.append(f"no rope_theta is written and it loads as {understood:g}")
    scaling = written.get("rope_scaling")
    kind = "default" if not scaling else scaling.get("rope_type", scaling.get("type"))
    if kind != loaded.get("rope_type"):
        differences.append(f"rope type written as {kind!r} loads as {loaded.get('rope_type')!r}")
    return differences
