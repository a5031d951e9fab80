"""What a run writes while it trains: one record per step, one per held-out evaluation."""

from pydantic import BaseModel, ConfigDict

RECORD_SCHEMA_VERSION = 1


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BatchRecord(_Frozen):
    """One batch as it was trained: what it held and what it gave."""

    batch: int  # position in the plan
    bucket_id: int
    rank: int
    batch_size: int  # samples
    min_tokens: int
    mean_tokens: float
    max_tokens: int
    num_tokens: int  # real tokens
    num_padded_tokens: int  # rows x longest row
    num_supervised_tokens: int
    num_anchors: int  # blocks
    num_slots: int  # supervised block slots
    num_truncated_blocks: int  # blocks whose supervision stops before their last slot
    label_weight: float  # sum of slot weights
    loss: float  # weighted mean over this batch alone; 0 if label_weight is 0
    acceptance_length: float  # estimate over the whole blocks; 1 = no drafted token accepted


class StepRecord(_Frozen):
    """One optimizer update: a line of ``log.jsonl``."""

    schema_version: int = RECORD_SCHEMA_VERSION
    step: int  # counted from 0
    attempt: int  # process start; of two records of a step the one with the larger attempt counts
    epoch: int
    loss: float  # sum of weighted losses / sum of weights, over all batches and ranks
    label_weight: float
    accuracy_by_slot: tuple[float, ...]  # slots 1 .. block_size - 1; supervised slots only
    count_by_slot: tuple[int, ...]
    acceptance_length: float  # estimated, bonus token counted
    grad_norm: float  # before clipping; null in the log when not finite (then skipped is true)
    learning_rate: float
    skipped: bool  # non-finite gradients: no update was made
    batches: tuple[BatchRecord, ...]
    num_tokens: int
    num_padded_tokens: int
    num_supervised_tokens: int
    num_anchors: int
    padding_efficiency: float  # num_tokens / num_padded_tokens
    tokens_per_second: float  # real tokens
    data_wait_seconds: float  # this and the next two are those of rank 0
    compute_seconds: float
    checkpoint_seconds: float  # steps were held up so long by checkpoints since the record before
    finished_at: float  # seconds since 1970, UTC


class BucketEvaluation(_Frozen):
    """Held-out figures of the samples of one bucket."""

    bucket_id: int
    num_samples: int
    num_blocks: int
    loss: float
    acceptance_length: float


class EvaluationRecord(_Frozen):
    """Held-out samples on fixed anchors: a line of ``evaluation.jsonl``."""

    schema_version: int = RECORD_SCHEMA_VERSION
    step: int  # updates done so far; 0 = before training
    attempt: int
    num_samples: int
    loss: float
    accuracy_by_slot: tuple[float, ...]
    count_by_slot: tuple[int, ...]
    acceptance_length: float
    num_blocks: int  # whole blocks, the ones acceptance_length averages
    num_truncated_blocks: int
    by_bucket: tuple[BucketEvaluation, ...]
    seconds: float
    finished_at: float


class TrainState(_Frozen):
    """``state.json`` of a checkpoint: where the run stands and what it belongs to."""

    schema_version: int = RECORD_SCHEMA_VERSION
    step: int  # updates done; the next step of the plan
    attempt: int
    plan_fingerprint: str
    store_fingerprints: tuple[str, ...]
    drafter_fingerprint: str
    settings_fingerprint: str  # loss, optimizer, evaluation and numerics settings
    threads: int
    skipped_steps: int
    consecutive_skipped_steps: int
    best_step: int | None
    best_loss: float | None
    versions: dict[str, str]
    files: dict[str, tuple[int, str]]  # tensors beside this file: size, SHA-256
