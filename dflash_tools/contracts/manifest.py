"""The store manifest: the identity card of a store, written last."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

STORE_FORMAT: Literal["dflash-tools-store"] = "dflash-tools-store"
STORE_SCHEMA_VERSION = 1

Codec = Literal["none", "lossless"]
HiddenStatesDtype = Literal["bfloat16", "fp8"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetIdentity(_Frozen):
    """The target whose states are cached."""

    model: str  # as given in the config: hub id, folder, or package:NAME
    revision: str | None
    gguf_file: str | None
    architecture: str  # class of the loaded model, e.g. LlamaForCausalLM
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int  # rows of the embedding, which may exceed the tokenizer's length
    dtype: str  # the forward ran in this dtype
    quantization: str | None  # e.g. "dequantised Q4_1"; None for full-precision weights
    attn_implementation: str
    config_fingerprint: str


class TokenizerIdentity(_Frozen):
    """What the choice of a mask token and a later "same tokenizer?" check need."""

    fingerprint: str
    chat_template_fingerprint: str | None
    num_tokens: int  # len(tokenizer)
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    mask_token_id: int | None  # the tokenizer's own mask token
    control_token_ids: tuple[int, ...]  # added or special tokens, ascending
    used_control_token_ids: tuple[int, ...]  # those that occur in the cached data


class DataIdentity(_Frozen):
    """How conversations became samples."""

    name: str
    sources: tuple[str, ...]
    content_fingerprint: str  # over the sample ids in row order
    chat_template_kwargs: dict[str, str | int | float | bool | None]
    max_tokens: int
    too_long: str
    loss_on: str
    validation_fraction: float


class Accounting(_Frozen):
    """Where every input row went: kept + dropped + merged = read."""

    read: int
    kept: int
    dropped: int
    merged: int
    dropped_by_reason: dict[str, int]


class BucketLayout(_Frozen):
    """Samples of ``min_tokens <= num_tokens <= max_tokens`` and how their bucket is cut."""

    bucket_id: int
    min_tokens: int
    max_tokens: int
    num_samples: int
    num_tokens: int  # real tokens
    axis_tokens: int  # length of the token axis, alignment and shard-end slack included
    chunk_tokens: int  # inner chunk of hidden_states
    shard_tokens: int  # multiple of chunk_tokens
    num_shards: int


class StoreManifest(_Frozen):
    """Everything a reader must know; its presence means that the store is complete."""

    format: Literal["dflash-tools-store"] = STORE_FORMAT
    schema_version: int = STORE_SCHEMA_VERSION
    target: TargetIdentity
    target_layer_ids: tuple[int, ...]  # output of decoder layer i, counted from 0
    hidden_size: int
    hidden_states_dtype: HiddenStatesDtype
    codec: Codec
    last_hidden_state: Literal["pre_norm", "post_norm"] | None
    tokenizer: TokenizerIdentity
    data: DataIdentity
    accounting: Accounting
    buckets: tuple[BucketLayout, ...]
    num_samples: int
    num_tokens: int
    num_supervised_tokens: int
    num_bytes: int  # bytes of all shard files
    forward_token_budget: int
    threads: int
    index_fingerprint: str
    versions: dict[str, str]  # library -> version
    fp8_error: tuple[float, ...] | None = None  # fp8 only: relative L2 error of each captured layer
    fp8_first_token_error: tuple[float, ...] | None = None  # the same over the first token of each sample
    files: dict[str, tuple[int, str]]  # every file that no commit record names: size, SHA-256
    checksum: str = ""  # SHA-256 of this document with the field blank

    def fingerprint(self) -> str:
        """Identity of the store's content: what a plan and a checkpoint record."""
        return self.checksum
