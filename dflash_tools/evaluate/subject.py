"""What is evaluated: the checkpoint of a run, or an exported or released drafter, and the target it belongs to."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from dflash_tools.config import TargetSection, resolve_model_folder
from dflash_tools.contracts.manifest import TargetIdentity
from dflash_tools.contracts.record import EvaluationRecord
from dflash_tools.contracts.run_folder import (
    CARD_FILE,
    DRAFTER_FILE,
    EVALUATION_FILE,
    find_checkpoint,
    read_card,
)
from dflash_tools.drafter.checkpoint_file import OWN_BLOCK, LayerIdConvention, read_checkpoint_file
from dflash_tools.drafter.config import DrafterConfig
from dflash_tools.drafter.model import DFlashDrafter
from dflash_tools.drafter.released import load_drafter
from dflash_tools.errors import ConfigError
from dflash_tools.target.load import Target


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A drafter and what is known of its training.

    Attributes:
        path: Run folder or drafter folder.
        step: Updates done; None for a drafter that does not say.
        drafter: The model, in the dtype of its file.
        target: What it was trained for, if known: name and identity.
        target_name: The target's name where no more is known.
        tokenizer_fingerprint: Of the target's tokenizer, if known.
        chat_template_fingerprint: Of its chat template, if known.
        chat_template_kwargs: Arguments of the chat template in training.
        stores: Stores it was trained on, where they lay.
        results_dir: Where results are kept; None for a drafter folder, which stays as it is.
        trained_acceptance_length: Held-out estimate of training at this checkpoint.
    """

    path: Path
    step: int | None
    drafter: DFlashDrafter
    target: TargetIdentity | None
    target_name: str | None = None
    tokenizer_fingerprint: str | None = None
    chat_template_fingerprint: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    stores: tuple[Path, ...] = ()
    results_dir: Path | None = None
    trained_acceptance_length: float | None = None

    @property
    def config(self) -> DrafterConfig:
        """The drafter's configuration."""
        return self.drafter.config


def open_subject(path: Path, checkpoint: str, layer_ids_are: LayerIdConvention | None = None) -> Subject:
    """Load a drafter from a run folder or a drafter folder.

    Args:
        path: A folder with ``run.json`` or with ``config.json``.
        checkpoint: ``best``, ``latest`` or a number of steps; for a run.
        layer_ids_are: How layer ids of a drafter folder count, where it cannot tell.

    Raises:
        ConfigError: If the folder is neither, or the drafter cannot be used.
        ResumeError: If the run has no such checkpoint.
    """
    if (path / CARD_FILE).is_file():
        return _open_run(path, checkpoint)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: neither a run ({CARD_FILE}) nor a drafter (config.json); give one of them")
    return _open_folder(path, layer_ids_are)


def target_section(subject: Subject, target: str | None, dtype: str) -> TargetSection:
    """Say which target to load: the one given, else the one the drafter was trained for.

    Raises:
        ConfigError: If neither is known, or the dtype is no dtype.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype {dtype}: expected float32, bfloat16 or float16")
    trained, options = subject.target, {"dtype": dtype}
    if target is None and trained is not None:
        known = {"revision": trained.revision, "gguf_file": trained.gguf_file}
        return TargetSection.model_validate(
            {"model": trained.model, "attn_implementation": trained.attn_implementation, **known, **options}
        )
    name = target or subject.target_name
    if name is None:
        raise ConfigError(f"{subject.path}: does not say which target it belongs to; add --target MODEL")
    return TargetSection.model_validate({"model": name, "gguf_file": only_gguf(name), **options})


def differing_copies(subject: Subject, target: Target) -> list[str]:
    """Name copies of the target's embedding and head in a drafter folder that are not the target's own.

    They are not used here; a drafter trained with others would be measured wrongly without a word.
    """
    if subject.results_dir is not None:
        return []  # a run holds no copies
    entries = read_checkpoint_file(subject.path).tensors
    own = {"embed_tokens.weight": target.embedding.weight, "lm_head.weight": target.head.weight}
    differing = []
    for name, weight in own.items():
        if name not in entries or not isinstance(weight, Tensor):
            continue
        with safe_open(entries[name].path, framework="pt") as file:
            copy = file.get_tensor(name)
        if copy.shape != weight.shape or not torch.allclose(copy.float(), weight.cpu().float(), rtol=0.01, atol=1e-3):
            differing.append(name)
    return differing


def only_gguf(model: str) -> str | None:
    """Find the GGUF file of a local folder that holds no other weights; None for other folders and hub ids.

    Raises:
        ConfigError: If there are several.
    """
    folder = Path(resolve_model_folder(model))
    if not folder.is_dir() or (folder / "config.json").is_file():
        return None
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if len(found) > 1:
        raise ConfigError(f"--target {model}: holds {', '.join(found)}; give a folder with one of them")
    return found[0] if found else None


def _open_run(path: Path, checkpoint: str) -> Subject:
    card = read_card(path)
    folder, state = find_checkpoint(path, checkpoint)
    drafter = DFlashDrafter(DrafterConfig.from_dict(card.drafter))
    drafter.load_state_dict(load_file(folder / DRAFTER_FILE))
    return Subject(
        path=path,
        step=state.step,
        drafter=drafter.requires_grad_(False).eval(),
        target=card.target,
        tokenizer_fingerprint=card.tokenizer.fingerprint,
        chat_template_fingerprint=card.tokenizer.chat_template_fingerprint,
        chat_template_kwargs=dict(card.data[0].chat_template_kwargs),
        stores=tuple(Path(store.path) for store in card.stores),
        results_dir=path / "evaluate",
        trained_acceptance_length=_trained_estimate(path, state.step),
    )


def _trained_estimate(run_dir: Path, step: int) -> float | None:
    path, newest = run_dir / EVALUATION_FILE, None
    if not path.is_file():
        return None
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = EvaluationRecord.model_validate_json(line)
        except ValidationError:
            continue  # the line that a kill cut off
        if record.step == step and (newest is None or record.attempt >= newest.attempt):
            newest = record
    # Without a whole block the record holds 1.0, which was not measured.
    return newest.acceptance_length if newest is not None and newest.num_blocks else None


def _open_folder(path: Path, layer_ids_are: LayerIdConvention | None) -> Subject:
    raw = read_checkpoint_file(path).config
    own = raw.get(OWN_BLOCK) or {}
    _, drafter = load_drafter(path, layer_ids_are=layer_ids_are)
    named = (raw.get("speculators_config") or {}).get("verifier", {}).get("name_or_path")
    data = own.get("data") or [{}]
    return Subject(
        path=path,
        step=own.get("step"),
        drafter=drafter,
        target=TargetIdentity.model_validate_json(json.dumps(own["target"])) if own.get("target") else None,
        target_name=named,
        tokenizer_fingerprint=own.get("tokenizer_fingerprint"),
        chat_template_fingerprint=own.get("chat_template_fingerprint"),
        chat_template_kwargs=dict(data[0].get("chat_template_kwargs") or {}),
    )
