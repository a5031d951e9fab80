"""A finished store of random states, with everything that training and reports read; equal arguments, equal bytes."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from tiny_models import make_tiny_tokenizer

from dflash_tools import __version__
from dflash_tools.contracts.index import TRAIN, VALIDATION
from dflash_tools.contracts.manifest import (
    Accounting,
    DataIdentity,
    StoreManifest,
    TargetIdentity,
    TokenizerIdentity,
)
from dflash_tools.store.arrays import StoreShape
from dflash_tools.store.bf16 import to_bf16_bits
from dflash_tools.store.index import INDEX_SCHEMA, write_index
from dflash_tools.store.layout import Layout, build_layout
from dflash_tools.store.writer import StoreWriter

LENGTHS = (5, 40, 17, 33, 9, 64, 21, 12, 50, 28, 7, 45)


def make_store(
    path: Path,
    lengths: Sequence[int] = LENGTHS,
    *,
    edges: Sequence[int] | None = None,
    hidden_size: int = 32,
    num_layers: int = 3,
    vocab_size: int = 322,
    validation_rows: Sequence[int] = (),
    codec: str = "none",
    hidden_states_dtype: str = "bfloat16",
    last_hidden_state: bool = False,
    num_hidden_layers: int = 6,
    tie_word_embeddings: bool = True,
    shard_bytes: int | None = None,
    forward_token_budget: int = 128,
    seed: int = 0,
    target: bool = True,
    finish: bool = True,
) -> Path:
    """Write a store; one that was stopped half-way goes on.

    Args:
        path: Its folder.
        lengths: Tokens of each sample; sample i is found by ``sample_id(i)``, index rows are in layout order.
        edges: Longest length of each bucket; default two buckets, cut at the median length.
        hidden_size: Width of a state.
        num_layers: Captured layers: 1 .. num_layers.
        vocab_size: Rows of the target's embedding; ids lie below it.
        validation_rows: Samples (positions in ``lengths``) that are held out.
        codec: "none" or "lossless".
        hidden_states_dtype: "bfloat16" or "fp8".
        last_hidden_state: Keep it too.
        num_hidden_layers: Decoder layers of the target.
        tie_word_embeddings: No lm_head.weight in frozen.safetensors.
        shard_bytes: Small values make several shards per bucket.
        forward_token_budget: Padded tokens of a forward batch.
        seed: Of everything random.
        target: Write STORE/target/ too (needs transformers).
        finish: Write the manifest.
    """
    num_tokens = np.array(lengths, dtype=np.int32)
    if edges is None:
        edges = sorted({int(np.median(num_tokens)), int(num_tokens.max())})
    shape = StoreShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        hidden_states_dtype=hidden_states_dtype,
        codec=codec,
        last_hidden_state=last_hidden_state,
    )
    layout = build_layout(
        num_tokens,
        np.searchsorted(edges, num_tokens).astype(np.int32),
        edges,
        bytes_per_token=shape.bytes_per_token,
        codec=codec,
        forward_token_budget=forward_token_budget,
        seed=seed,
        shard_bytes=shard_bytes,
    )
    path.mkdir(parents=True, exist_ok=True)
    tokens = [_tokens(i, length, vocab_size, seed) for i, length in enumerate(lengths)]
    index = _index(tokens, layout, np.searchsorted(edges, num_tokens), set(validation_rows))
    write_index(path, index)
    pl.DataFrame(schema={"source": pl.String(), "source_row": pl.Int64(), "reason": pl.String()}).write_parquet(
        path / "dropped.parquet"
    )
    (path / "extraction.json").write_text(json.dumps({"seed": seed}) + "\n")
    writer = StoreWriter(path, shape, layout.buckets)
    writer.create_arrays()
    writer.clean_uncommitted()
    for bucket_id, shard_id in sorted(set(writer.shards()) - writer.committed()):
        samples = layout.row_order[list(writer.rows_of(bucket_id, shard_id))]
        writer.write_tokens(bucket_id, shard_id, [tokens[i][0] for i in samples], [tokens[i][1] for i in samples])
        writer.write_shard(
            bucket_id,
            shard_id,
            [make_states(i, lengths[i], num_layers, hidden_size, seed) for i in samples],
            [make_states(i, lengths[i], 1, hidden_size, seed + 1)[:, 0] for i in samples]
            if last_hidden_state
            else None,
        )
    if target:
        write_target(path / "target", hidden_size, num_hidden_layers, vocab_size, tie_word_embeddings, seed)
    if finish:
        writer.finish(
            _manifest(shape, layout, index, vocab_size, num_hidden_layers, forward_token_budget, len(lengths))
        )
    return path


def sample_id(i: int, seed: int = 0) -> str:
    """Id of sample ``i`` of ``make_store``."""
    return _hex(f"sample {i} {seed}")


def make_states(i: int, length: int, num_layers: int, hidden_size: int, seed: int = 0) -> np.ndarray:
    """bfloat16 bits of sample ``i``, shape (length, num_layers, hidden_size); the first token is large."""
    values = np.random.default_rng([seed, i]).standard_normal((length, num_layers, hidden_size), dtype=np.float32)
    values[0] *= 300.0
    return to_bf16_bits(values)


def write_target(
    folder: Path, hidden_size: int, num_hidden_layers: int, vocab_size: int, tie_word_embeddings: bool, seed: int
) -> None:
    """Write STORE/target/ of a random Llama."""
    from safetensors.numpy import save_file
    from transformers import GenerationConfig, LlamaConfig

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tiny_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    generator = np.random.default_rng([seed, 1 << 20])
    tensors = {
        "embed_tokens.weight": generator.standard_normal((vocab_size, hidden_size), dtype=np.float32) * np.float32(0.1),
        "norm.weight": np.ones(hidden_size, dtype=np.float32),
    }
    if not tie_word_embeddings:
        head = generator.standard_normal((vocab_size, hidden_size), dtype=np.float32)
        tensors["lm_head.weight"] = head * np.float32(0.1)
    save_file(tensors, folder / "frozen.safetensors")
    probe = {"input_ids": [3, 4, 5], "top1": [1, 1, 1], "gap": [0.1, 0.1, 0.1]}
    (folder / "probe.json").write_text(json.dumps(probe) + "\n")


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _tokens(i: int, length: int, vocab_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng([seed, i, 7])
    input_ids = generator.integers(4, vocab_size, length, dtype=np.int32)
    loss_mask = np.ones(length, dtype=np.uint8)
    loss_mask[: length // 3] = 0  # a prompt, then the answer
    return input_ids, loss_mask


def _index(tokens: list, layout: Layout, bucket_ids: np.ndarray, validation_rows: set[int]) -> pl.DataFrame:
    masks = [mask for _, mask in tokens]
    frame = pl.DataFrame(
        {
            "sample_id": [sample_id(i) for i in range(len(tokens))],
            "conversation_id": [hashlib.sha256(input_ids.tobytes()).hexdigest()[:32] for input_ids, _ in tokens],
            "source": ["made.jsonl"] * len(tokens),
            "source_row": range(1, len(tokens) + 1),
            "split": [VALIDATION if i in validation_rows else TRAIN for i in range(len(tokens))],
            "bucket_id": bucket_ids,
            "shard_id": layout.shard_ids,
            "forward_id": layout.forward_ids,
            "start": layout.starts,
            "num_tokens": [len(mask) for mask in masks],
            "num_supervised_tokens": [int(mask.sum()) for mask in masks],
            "num_valid_anchors": [int((mask[:-1] & mask[1:]).sum()) for mask in masks],
        },
        schema=INDEX_SCHEMA,
        strict=False,
    )
    return frame[layout.row_order]


def _manifest(
    shape: StoreShape,
    layout: Layout,
    index: pl.DataFrame,
    vocab_size: int,
    num_hidden_layers: int,
    forward_token_budget: int,
    num_rows: int,
) -> StoreManifest:
    return StoreManifest(
        target=TargetIdentity(
            model="tiny",
            revision=None,
            gguf_file=None,
            architecture="LlamaForCausalLM",
            model_type="llama",
            num_hidden_layers=num_hidden_layers,
            hidden_size=shape.hidden_size,
            vocab_size=vocab_size,
            dtype="bfloat16",
            quantization=None,
            attn_implementation="sdpa",
            config_fingerprint="0" * 64,
        ),
        target_layer_ids=tuple(range(1, shape.num_layers + 1)),
        hidden_size=shape.hidden_size,
        hidden_states_dtype=shape.hidden_states_dtype,
        codec=shape.codec,
        last_hidden_state="pre_norm" if shape.last_hidden_state else None,
        tokenizer=TokenizerIdentity(
            fingerprint="1" * 64,
            chat_template_fingerprint=None,
            num_tokens=min(vocab_size, 322),
            bos_token_id=0,
            eos_token_ids=(2,),
            pad_token_id=0,
            mask_token_id=None,
            control_token_ids=(0, 1, 2, 3),
            used_control_token_ids=(1, 2),
        ),
        data=DataIdentity(
            name="made",
            sources=("made.jsonl",),
            content_fingerprint=hashlib.sha256("".join(index["sample_id"].to_list()).encode()).hexdigest(),
            chat_template_kwargs={},
            max_tokens=8192,
            too_long="truncate",
            loss_on="assistant",
            validation_fraction=0.0,
        ),
        accounting=Accounting(read=num_rows, kept=num_rows, dropped=0, merged=0, dropped_by_reason={}),
        buckets=layout.buckets,
        num_samples=len(index),
        num_tokens=int(index["num_tokens"].sum()),
        num_supervised_tokens=int(index["num_supervised_tokens"].sum()),
        num_bytes=0,
        forward_token_budget=forward_token_budget,
        threads=1,
        index_fingerprint="",
        versions={"dflash-tools": __version__},
        files={},
    )
