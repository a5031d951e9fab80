"""Rules over the tensors of a drafter: names, shapes, dtype, values."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from dflash_tools.drafter.check_config import SIZES, layer_config
from dflash_tools.drafter.checkpoint_file import TARGET_COPIES, VOCABULARY_MAPS, CheckpointFile
from dflash_tools.drafter.checkpoint_view import tensor_shapes
from dflash_tools.drafter.finding import Finding, fault_unless, warn_unless

DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
PREFIX = "model."


def check_tensors(file: CheckpointFile, view: Mapping[str, Any]) -> list[Finding]:
    """Check the tensors against the config.

    Args:
        file: The drafter folder.
        view: Its config by the keys of the z-lab layout.
    """
    prefixed = [name for name in file.tensors if name.startswith(PREFIX)]
    copies = [name for name in file.tensors if name in TARGET_COPIES]
    findings = [
        fault_unless(
            not prefixed,
            "tensor names have no prefix",
            f"{len(prefixed)} start with {PREFIX!r}",
            "none: vLLM adds it itself",
        ),
        warn_unless(
            not copies or file.layout == "speculators",
            "no copies of the target's embedding and head",
            ", ".join(copies) or "none",
            "none: engines use the target's own",
        ),
    ]
    return [*findings, *_against_config(file, view), *_dtype(file), _finite(file)]


def _against_config(file: CheckpointFile, view: Mapping[str, Any]) -> list[Finding]:
    rule = "tensors are those of the config"
    unknown_sizes = [key for key in SIZES if not isinstance(view.get(key), int)]
    if unknown_sizes or not view.get("target_layer_ids"):
        absent = [*unknown_sizes, *([] if view.get("target_layer_ids") else ["target_layer_ids"])]
        return [fault_unless(False, rule, f"cannot be compared without {', '.join(absent)}")]
    expected = tensor_shapes(view)
    own = {
        name.removeprefix(PREFIX): entry.shape
        for name, entry in file.tensors.items()
        if name not in TARGET_COPIES and name not in VOCABULARY_MAPS
    }
    missing, unknown = sorted(expected.keys() - own.keys()), sorted(own.keys() - expected.keys())
    found = f"{len(own)} tensors" + _named("missing", missing) + _named("unknown", unknown)
    wrong = [
        f"{name} {list(own[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if own.get(name, shape) != shape
    ]
    shapes = f"{len(wrong)} differ, first {wrong[0]}" if wrong else "all"
    return [
        fault_unless(not missing and not unknown, rule, found, f"{len(expected)} tensors"),
        fault_unless(not wrong, "tensor shapes are those of the config", shapes),
    ]


def _dtype(file: CheckpointFile) -> list[Finding]:
    layers = layer_config(file)
    stated = (
        layers.get("dtype") or layers.get("torch_dtype") or file.config.get("dtype") or file.config.get("torch_dtype")
    )
    counts = Counter(entry.dtype for name, entry in file.tensors.items() if name not in VOCABULARY_MAPS)
    found = {DTYPE_NAMES.get(name, name) for name in counts}
    return [
        fault_unless(stated is not None, "dtype is stated", stated, "the dtype of the tensors"),
        fault_unless(
            found == {stated}, "dtype is that of every tensor", f"{stated}, tensors {sorted(found)}", "one dtype"
        ),
    ]


def _finite(file: CheckpointFile) -> Finding:
    bad = [
        name
        for name, tensor in file.read()
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all())
    ]
    return fault_unless(not bad, "every value is finite", f"NaN or infinity in {', '.join(bad[:3])}" if bad else "all")


def _named(kind: str, names: list[str]) -> str:
    return f", {len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
