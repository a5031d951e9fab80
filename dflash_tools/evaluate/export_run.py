"""``export``: write the checkpoint of a run in a layout that serving engines load, and say how to serve it."""

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from dflash_tools.contracts.run_folder import DRAFTER_FILE, RunCard, find_checkpoint, read_card
from dflash_tools.drafter.checkpoint_file import Layout
from dflash_tools.drafter.config import DrafterConfig
from dflash_tools.drafter.export import Provenance, export_drafter
from dflash_tools.drafter.serving import serving_commands
from dflash_tools.errors import ConfigError
from dflash_tools.evaluate.push import push_export

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def export_run(
    run: Path, out: Path, *, checkpoint: str = "best", layout: str = "zlab", push_to: str | None = None
) -> dict[str, Any]:
    """Export a checkpoint. Optimizer files are not needed.

    Args:
        run: A run folder.
        out: Folder to write; must not exist, or be empty.
        checkpoint: ``best``, ``latest`` or a number of steps.
        push_to: Also upload the export to this hub repository, ``OWNER/NAME``; a new one is private.
        layout: ``zlab`` (SGLang, vLLM, llama.cpp, z-lab's package) or ``speculators`` (vLLM).

    Returns:
        Where the export lies, its size, what it belongs to, and the serving command of each engine: ``serve_sglang``,
        ``serve_vllm``, ``serve_llama_cpp``.

    Raises:
        ConfigError: If the layout is unknown, the folder is used, or the drafter would not serve.
        ResumeError: If the run has no such checkpoint.
    """
    card = read_card(run)
    folder, state = find_checkpoint(run, checkpoint)
    chosen = _layout(layout)
    config = DrafterConfig.from_dict(card.drafter)
    tensors = load_file(folder / DRAFTER_FILE)
    provenance = Provenance(
        target=card.target,
        tokenizer=card.tokenizer,
        data=card.data,
        store_fingerprints=tuple(store.fingerprint for store in card.stores),
        hidden_states_dtype=card.hidden_states_dtype,
        step=state.step,
    )
    commands = serving_commands(
        out, _served_target(card), config.block_size, layout=chosen, gguf_file=card.target.gguf_file
    )
    measured = _measured(run, state.step)
    text = _card(out, card, config, provenance, commands, measured)
    warnings = export_drafter(config, tensors, provenance, out, layout=chosen, card=text)
    return {
        "export": str(out),
        "layout": chosen,
        "step": state.step,
        "num_parameters": sum(tensor.numel() for tensor in tensors.values()),
        "num_bytes": sum(path.stat().st_size for path in out.iterdir()),
        "target": card.target.model,
        "states": provenance.to_dict()["states"],
        "block_size": config.block_size,
        "num_draft_tokens": config.block_size - 1,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "warnings": warnings,
        "pushed": push_export(out, push_to) if push_to else None,
        **{f"serve_{engine.replace('.', '_')}": command for engine, command in commands.items()},
    }


def _layout(name: str) -> Layout:
    if name == "zlab":
        return "zlab"
    if name == "speculators":
        return "speculators"
    raise ConfigError(f"--format {name}: expected zlab or speculators")


def _served_target(card: RunCard) -> str:
    # Engines know hub ids and folders, not installed Python packages.
    return "TARGET" if card.target.model.startswith("package:") else card.target.model


def _is_hub_id(model: str) -> bool:
    return HUB_ID.fullmatch(model) is not None and not Path(model).exists()


def _measured(run: Path, step: int) -> list[dict[str, Any]]:
    """Find what ``evaluate`` measured at a checkpoint."""
    found = []
    for path in sorted((run / "evaluate").glob(f"step-{step:07d}-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("acceptance_length") is not None:
            found.append(result)
    return found


def _card(
    out: Path,
    card: RunCard,
    config: DrafterConfig,
    provenance: Provenance,
    commands: dict[str, str],
    measured: list[dict[str, Any]],
) -> str:
    target, data = card.target, card.data
    revision = target.revision or "not known"
    lines = [
        "---",
        "library_name: transformers",
        "tags: [speculative-decoding, dflash]",
        *([f"base_model: {target.model}"] if _is_hub_id(target.model) else []),
        "---",
        f"# {out.name}",
        "",
        f"A DFlash drafter for `{target.model}` (revision {revision}): it drafts {config.block_size - 1} tokens at "
        "once from the target's hidden states, and the target verifies them. It is of no use without that target.",
        "",
        f"* Architecture: {config.num_hidden_layers} layers, blocks of {config.block_size}, mask token "
        f"{config.mask_token_id}, target layers {list(config.target_layer_ids)} (outputs of decoder layers from 0).",
        f"* Training: {provenance.step} updates on {', '.join(sorted({one.name for one in data}))}; "
        f"{provenance.to_dict()['states']}.",
        f"* Chat template: fingerprint {card.tokenizer.chat_template_fingerprint or 'none'}, arguments "
        f"{json.dumps(data[0].chat_template_kwargs)}. Serve with the same.",
        "",
        "## Measured",
        "",
        *(_measurement(result) for result in measured),
        *([] if measured else ["Not measured; run `dflash-tools evaluate`."]),
        "",
        "## Serve",
        "",
    ]
    for engine, command in commands.items():
        lines += [f"{engine}:", "", "```", command, "```", ""]
    return "\n".join(lines)


def _measurement(result: dict[str, Any]) -> str:
    interval = result.get("acceptance_interval")
    between = f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    source = result["prompts"].split(" ")[0].rstrip(",")
    return (
        f"* Acceptance length {result['acceptance_length']:.2f}{between}, bonus token counted: "
        f"{result['num_prompts']} prompts, {source}, {result['dtype']}, temperature {result['temperature']:g}, "
        f"{result['num_draft_tokens']} drafted tokens per cycle."
    )
