"""Stores without arrays and runs without training, with faults put in on purpose; equal arguments, equal files."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import tomli_w

from dflash_tools.config import TrainConfig
from dflash_tools.contracts.manifest import (
    Accounting,
    BucketLayout,
    DataIdentity,
    StoreManifest,
    TargetIdentity,
    TokenizerIdentity,
)
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.contracts.record import BatchRecord, BucketEvaluation, EvaluationRecord, StepRecord
from dflash_tools.contracts.run_folder import (
    CARD_FILE,
    CONFIG_FILE,
    EVALUATION_FILE,
    LOG_FILE,
    PLAN_FILE,
    RunCard,
    StoreReference,
)
from dflash_tools.plan.buckets import assign_buckets, choose_edges
from dflash_tools.plan.stores import plan_stores
from dflash_tools.plan.table import save_plan
from dflash_tools.report.composition import frame_of_plan
from dflash_tools.report.sources import read_pool
from dflash_tools.store.index import INDEX_SCHEMA, write_index
from dflash_tools.store.manifest_file import write_manifest

TARGET = TargetIdentity(
    model="made/target",
    revision=None,
    gguf_file=None,
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_hidden_layers=6,
    hidden_size=32,
    vocab_size=320,
    dtype="bfloat16",
    quantization=None,
    attn_implementation="sdpa",
    config_fingerprint="0" * 64,
)
TOKENIZER = TokenizerIdentity(
    fingerprint="1" * 64,
    chat_template_fingerprint=None,
    num_tokens=320,
    bos_token_id=0,
    eos_token_ids=(2,),
    pad_token_id=0,
    mask_token_id=None,
    control_token_ids=(0, 1, 2),
    used_control_token_ids=(2,),
)


def log_normal_lengths(number: int = 5000, seed: int = 0) -> np.ndarray:
    """The mix of conversations that plans are judged on: median 800 tokens, sigma 1, clipped to 16 .. 8,192."""
    lengths = np.random.default_rng(seed).lognormal(np.log(800), 1.0, number)
    return np.clip(lengths, 16, 8192).astype(np.int32)


def make_index_store(
    path: Path,
    lengths: Sequence[int] | np.ndarray,
    *,
    edges: Sequence[int] | None = None,
    supervised_share: float = 0.6,
    num_validation: int = 4,
    dropped: dict[str, int] | None = None,
    too_long: str = "truncate",
    max_tokens: int = 8192,
) -> Path:
    """Write index and manifest of a finished store: all that reports and plans read."""
    num_tokens = np.asarray(lengths, dtype=np.int32)
    bounds = np.asarray(edges if edges is not None else choose_edges(num_tokens, 6))
    bucket_ids = assign_buckets(num_tokens, bounds)
    supervised = np.floor(num_tokens * supervised_share).astype(np.int32)
    number = len(num_tokens)
    index = pl.DataFrame(
        {
            "sample_id": [hashlib.sha256(f"sample {i}".encode()).hexdigest()[:32] for i in range(number)],
            "conversation_id": ["0" * 32] * number,
            "source": ["chats.jsonl"] * number,
            "source_row": np.arange(1, number + 1),
            "split": ["validation" if i < num_validation else "train" for i in range(number)],
            "bucket_id": bucket_ids,
            "shard_id": np.zeros(number, np.int32),
            "forward_id": np.zeros(number, np.int32),
            "start": np.zeros(number, np.int64),
            "num_tokens": num_tokens,
            "num_supervised_tokens": supervised,
            "num_valid_anchors": np.maximum(supervised - 1, 0),
        },
        schema=INDEX_SCHEMA,
    )
    path.mkdir(parents=True, exist_ok=True)
    write_index(path, index)
    reasons = dropped or {}
    pl.DataFrame(
        {
            "source": ["chats.jsonl"] * sum(reasons.values()),
            "reason": [r for r, n in reasons.items() for _ in range(n)],
        },
        schema={"source": pl.String, "reason": pl.String},
    ).write_parquet(path / "dropped.parquet")
    lowest = np.concatenate([[1], bounds[:-1] + 1])
    content = (path / "index.parquet").read_bytes()
    write_manifest(
        path,
        StoreManifest(
            target=TARGET,
            target_layer_ids=(1, 3),
            hidden_size=32,
            hidden_states_dtype="bfloat16",
            codec="none",
            last_hidden_state=None,
            tokenizer=TOKENIZER,
            data=_data(too_long, max_tokens),
            accounting=Accounting(
                read=number + sum(reasons.values()),
                kept=number,
                dropped=sum(reasons.values()),
                merged=0,
                dropped_by_reason=reasons,
            ),
            buckets=tuple(
                BucketLayout(
                    bucket_id=bucket_id,
                    min_tokens=int(lowest[bucket_id]),
                    max_tokens=int(bounds[bucket_id]),
                    num_samples=int((bucket_ids == bucket_id).sum()),
                    num_tokens=int(num_tokens[bucket_ids == bucket_id].sum()),
                    axis_tokens=int(num_tokens[bucket_ids == bucket_id].sum()),
                    chunk_tokens=64,
                    shard_tokens=1024,
                    num_shards=1,
                )
                for bucket_id in range(len(bounds))
            ),
            num_samples=number,
            num_tokens=int(num_tokens.sum()),
            num_supervised_tokens=int(supervised.sum()),
            num_bytes=int(num_tokens.sum()) * 128,
            forward_token_budget=16384,
            threads=1,
            index_fingerprint="2" * 64,
            versions={"dflash-tools": "0"},
            files={"index.parquet": (len(content), hashlib.sha256(content).hexdigest())},
        ),
    )
    return path


def _data(too_long: str, max_tokens: int) -> DataIdentity:
    return DataIdentity(
        name="made",
        sources=("chats.jsonl",),
        content_fingerprint="3" * 64,
        chat_template_kwargs={},
        max_tokens=max_tokens,
        too_long=too_long,
        loss_on="assistant",
        validation_fraction=0.02,
    )


def plan_of(store: Path, config: TrainConfig) -> BatchPlan:
    """The plan that train would make."""
    return plan_stores(read_pool([store]).columns, config.plan, config.loss)


def make_run(
    run: Path,
    store: Path,
    config: TrainConfig,
    *,
    fault: Callable[[pl.DataFrame], np.ndarray] | None = None,
    change_step: Callable[[StepRecord], StepRecord] = lambda record: record,
    num_steps: int | None = None,
    held_out: Sequence[float] = (6.0, 4.0, 3.5, 3.3),
) -> Path:
    """Write a run folder as train would have left it.

    Args:
        run: Its folder.
        store: A store of ``make_index_store``.
        config: The run's settings.
        fault: From the frame of batches to what is added to the loss of each. Shape: (num_batches,).
        change_step: Last change of every record, e.g. a stall.
        num_steps: Steps that were trained; default all.
        held_out: Held-out loss at equal distances.
    """
    pool = read_pool([store])
    plan = plan_of(store, config)
    run.mkdir(parents=True, exist_ok=True)
    (run / CONFIG_FILE).write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    save_plan(plan, run / PLAN_FILE)
    card = RunCard(
        stores=(StoreReference(path=str(store), fingerprint=pool.columns.fingerprint),),
        plan_fingerprint=plan.fingerprint(),
        target=TARGET,
        tokenizer=TOKENIZER,
        data=(_data("truncate", 8192),),
        hidden_states_dtype="bfloat16",
        drafter={"block_size": 4},
        settings={},
        attempts=(),
    )
    (run / CARD_FILE).write_text(card.model_dump_json())
    batches = frame_of_plan(plan, pool.samples(config.loss))
    records = step_records(batches, config, fault(batches) if fault else np.zeros(len(batches)))
    records = [change_step(record) for record in records[:num_steps]]
    (run / LOG_FILE).write_text("".join(record.model_dump_json() + "\n" for record in records))
    (run / EVALUATION_FILE).write_text(
        "".join(
            evaluation_record(round(place * len(records) / max(len(held_out) - 1, 1)), loss).model_dump_json() + "\n"
            for place, loss in enumerate(held_out)
        )
    )
    return run


def step_records(batches: pl.DataFrame, config: TrainConfig, fault: np.ndarray) -> list[StepRecord]:
    """Records of a healthy run: the loss falls, each bucket has a level of its own, and noise is small."""
    draws = np.random.default_rng(1)
    steps = batches.partition_by("step", maintain_order=True)
    records = []
    for step, rows in enumerate(steps):
        progress = step / max(len(steps) - 1, 1)
        made = [_batch_record(row, progress, float(fault[row["batch"]]), draws) for row in rows.iter_rows(named=True)]
        weight = sum(batch.label_weight for batch in made)
        tokens, padded = sum(batch.num_tokens for batch in made), sum(batch.num_padded_tokens for batch in made)
        compute = 0.2 * float(draws.uniform(0.95, 1.05))
        records.append(
            StepRecord(
                step=step,
                attempt=1,
                epoch=rows.item(0, "epoch"),
                loss=sum(batch.loss * batch.label_weight for batch in made) / (weight or 1.0),
                label_weight=weight,
                accuracy_by_slot=(0.4 + 0.2 * progress, 0.3 + 0.2 * progress, 0.2 + 0.2 * progress),
                count_by_slot=(300, 280, 260),
                acceptance_length=1.1 + 0.5 * progress,
                grad_norm=float(draws.uniform(0.4, 0.6)),
                learning_rate=6e-4 * (1 - progress),
                skipped=False,
                batches=tuple(made),
                num_tokens=tokens,
                num_padded_tokens=padded,
                num_supervised_tokens=sum(batch.num_supervised_tokens for batch in made),
                num_anchors=sum(batch.num_anchors for batch in made),
                padding_efficiency=tokens / padded,
                tokens_per_second=tokens / compute,
                data_wait_seconds=0.01 * float(draws.uniform(0.5, 1.5)),
                compute_seconds=compute,
                checkpoint_seconds=0.1 if (step + 1) % config.checkpoint.save_steps == 0 else 0.0,
                finished_at=1.8e9 + step,
            )
        )
    return records


def _batch_record(row: dict, progress: float, fault: float, draws: np.random.Generator) -> BatchRecord:
    level = 3.0 + 3.0 * np.exp(-5 * progress) + 0.15 * row["bucket_id"]
    return BatchRecord(
        rank=0,
        num_slots=3 * row["num_anchors"],
        num_truncated_blocks=min(row["batch_size"], row["num_anchors"]),
        label_weight=float(row["num_anchors"]) * 2.0,
        loss=float(level + draws.normal(0, 0.03) + fault),
        acceptance_length=1.1 + 0.5 * progress,
        **{name: row[name] for name in _COPIED},
    )


_COPIED = (
    "batch",
    "bucket_id",
    "batch_size",
    "min_tokens",
    "mean_tokens",
    "max_tokens",
    "num_tokens",
    "num_padded_tokens",
    "num_supervised_tokens",
    "num_anchors",
)


def evaluation_record(step: int, loss: float, attempt: int = 1) -> EvaluationRecord:
    """One evaluation; the acceptance length rises as the loss falls."""
    acceptance_length = 1.0 + 1.5 / loss
    bucket = BucketEvaluation(bucket_id=0, num_samples=4, num_blocks=50, loss=loss, acceptance_length=acceptance_length)
    return EvaluationRecord(
        step=step,
        attempt=attempt,
        num_samples=4,
        loss=loss,
        accuracy_by_slot=(0.4, 0.3, 0.2),
        count_by_slot=(50, 50, 50),
        acceptance_length=acceptance_length,
        num_blocks=50,
        num_truncated_blocks=2,
        by_bucket=(bucket,),
        seconds=0.5,
        finished_at=1.8e9 + step,
    )
