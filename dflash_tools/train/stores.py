"""The stores of a run as one table of samples: rows of the second follow those of the first."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dflash_tools.config import TrainConfig
from dflash_tools.contracts.index import TRAIN, VALIDATION
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.errors import StoreError
from dflash_tools.plan.anchors import anchors_per_sample
from dflash_tools.plan.stores import JoinedColumns, StoreColumns, join_stores, plan_stores
from dflash_tools.store import Store, open_store

_FROZEN = "target/frozen.safetensors"


@dataclass(frozen=True, eq=False, kw_only=True)
class Samples:
    """All samples of all stores; a row is a position in these columns.

    Attributes:
        stores: In the order given.
        first_rows: Row of the first sample of each store. Shape: (num_stores,).
        columns: Lengths, buckets, valid anchors and split, as the plan sees them.
        num_supervised_tokens: Shape: (num_samples,).
        sample_ids: 32 hex digits each. Shape: (num_samples,).
        validation_rows: Rows that are held out, ascending.
    """

    stores: tuple[Store, ...]
    first_rows: NDArray[np.int64]
    columns: JoinedColumns
    num_supervised_tokens: NDArray[np.int64]
    sample_ids: NDArray[np.object_]
    validation_rows: NDArray[np.int64]

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Length of every row. Shape: (num_samples,)."""
        return self.columns.num_tokens

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Identity of each store."""
        return tuple(store.manifest.fingerprint() for store in self.stores)

    def locate(self, row: int) -> tuple[Store, int]:
        """Find the store of a row, and the row inside it."""
        position = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        return self.stores[position], row - int(self.first_rows[position])


def open_samples(paths: Sequence[Path]) -> Samples:
    """Open stores of one target.

    Raises:
        StoreError: If a store cannot be opened, is given twice, is of another target than the first, or if there is
            nothing to train on.
    """
    stores = tuple(open_store(path) for path in paths)
    for store in stores[1:]:
        _check_same_target(stores[0], store)
    _check_distinct(stores)
    _check_splits(stores)
    columns = join_stores([_columns_of(store) for store in stores])
    if not columns.is_training.any():
        raise StoreError(
            f"{paths[0]}: no sample in the training split; extract more data or lower data.validation_fraction"
        )
    splits = np.concatenate([store.index["split"].to_numpy().astype(object) for store in stores])
    return Samples(
        stores=stores,
        first_rows=np.cumsum([0, *(len(store) for store in stores)])[:-1],
        columns=columns,
        num_supervised_tokens=np.concatenate(
            [store.index["num_supervised_tokens"].to_numpy().astype(np.int64) for store in stores]
        ),
        sample_ids=np.concatenate([store.index["sample_id"].to_numpy().astype(object) for store in stores]),
        validation_rows=np.flatnonzero(splits == VALIDATION),
    )


def plan_training(samples: Samples, config: TrainConfig) -> BatchPlan:
    """Plan the whole run.

    Raises:
        ConfigError: If a sample does not fit a budget.
    """
    return plan_stores(samples.columns, config.plan, config.loss)


def anchors_of_rows(samples: Samples, config: TrainConfig) -> NDArray[np.int64]:
    """Blocks of every row in every epoch; 0 for held-out rows. Shape: (num_samples,)."""
    columns = samples.columns
    counts = np.zeros(len(columns.num_tokens), dtype=np.int64)
    counts[columns.is_training] = anchors_per_sample(
        columns.num_valid_anchors[columns.is_training], config.loss.num_anchors, config.loss.anchor_rule
    )
    return counts


def require_last_hidden(samples: Samples, loss_type: str) -> None:
    """Check that every store keeps the target's last hidden state, all of them in the same form.

    Raises:
        StoreError: If one does not.
    """
    forms = [store.manifest.last_hidden_state for store in samples.stores]
    for store, form in zip(samples.stores, forms, strict=True):
        if form is None:
            raise StoreError(
                f'{store.path}: loss.type = "{loss_type}" needs the last hidden state, which this store does not keep; '
                'extract with target.store_last_hidden_state = true, or use "ce" or "dpace"'
            )
        if form != forms[0]:
            raise StoreError(
                f"{store.path} keeps the last hidden state {form}, {samples.stores[0].path} {forms[0]}; "
                "train on stores of one kind"
            )


def _columns_of(store: Store) -> StoreColumns:
    index = store.index
    return StoreColumns(
        num_tokens=index["num_tokens"].to_numpy().astype(np.int64),
        bucket_ids=index["bucket_id"].to_numpy(),
        num_valid_anchors=index["num_valid_anchors"].to_numpy().astype(np.int64),
        is_training=(index["split"] == TRAIN).to_numpy(),
        fingerprint=store.manifest.fingerprint(),
        num_buckets=len(store.manifest.buckets),
    )


def _check_same_target(first: Store, other: Store) -> None:
    differing = []
    for name in ("architecture", "config_fingerprint", "quantization", "dtype"):
        found, expected = getattr(other.manifest.target, name), getattr(first.manifest.target, name)
        if found != expected:
            differing.append(f"target.{name} is {found}, not {expected}")
    for name in ("target_layer_ids", "hidden_size"):
        found, expected = getattr(other.manifest, name), getattr(first.manifest, name)
        if found != expected:
            differing.append(f"{name} is {found}, not {expected}")
    if other.manifest.tokenizer.fingerprint != first.manifest.tokenizer.fingerprint:
        differing.append("the tokenizer differs")
    if other.manifest.files.get(_FROZEN) != first.manifest.files.get(_FROZEN):
        differing.append(f"{_FROZEN} (embedding and head) has other bytes")
    if differing:
        raise StoreError(
            f"{other.path} cannot be trained on together with {first.path}: {'; '.join(differing)}. "
            "Extract both with the same target and layers, or train on one"
        )


def _check_distinct(stores: Sequence[Store]) -> None:
    seen: dict[str, Path] = {}
    for store in stores:
        fingerprint = store.manifest.fingerprint()
        if fingerprint in seen:
            raise StoreError(f"{store.path} is the same store as {seen[fingerprint]}; give each store once")
        seen[fingerprint] = store.path


def _check_splits(stores: Sequence[Store]) -> None:
    """Refuse to train on what another store holds out: every held-out figure would be flattered."""
    held_out, trained = (
        set().union(*(store.index.filter(pl.col("split") == split)["conversation_id"].to_list() for store in stores))
        for split in (VALIDATION, TRAIN)
    )
    both = held_out & trained
    if both:
        raise StoreError(
            f"{stores[0].path} and the other stores disagree on the split: {len(both)} conversations are held out in "
            "one and training in another; extract them with equal data.validation_fraction and min_validation_samples"
        )
