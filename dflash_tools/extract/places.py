"""From samples to the index: which are taken, held out, in which bucket, shard and forward batch. Lengths only."""

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dflash_tools.config import BucketsSection
from dflash_tools.contracts.index import TRAIN, VALIDATION
from dflash_tools.contracts.manifest import Accounting
from dflash_tools.data import choose_split
from dflash_tools.errors import ConfigError
from dflash_tools.extract.ingest import OVER_LIMIT, Ingested, account, drop_rows
from dflash_tools.extract.job import Job
from dflash_tools.plan.buckets import assign_buckets, choose_edges, choose_edges_optimal
from dflash_tools.store.index import INDEX_SCHEMA
from dflash_tools.store.layout import Layout, build_layout


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """The index of a store to be, and what else follows from lengths alone.

    Attributes:
        index: One row per sample, in row order.
        positions: Position of each index row among the ingested samples. Shape: (num_samples,).
        layout: Buckets, shards, starts.
        dropped: Rows that gave no sample of this store.
        accounting: Of all input rows.
    """

    index: pl.DataFrame
    positions: NDArray[np.int64]
    layout: Layout
    dropped: pl.DataFrame
    accounting: Accounting


def choose_places(ingested: Ingested, job: Job) -> Places:
    """Choose the place of every sample.

    Args:
        ingested: All samples, in input order.
        job: Split, buckets, forward batches, codec and limit.

    Raises:
        ConfigError: If a sample is longer than the last of explicit bucket edges, or than the target knows positions.
        DataError: If the validation split would leave nothing to train on.
    """
    config, data = job.config, job.data
    taken = take_samples(ingested.sample_ids, job.limit)
    dropped, accounting = _drop_over_limit(ingested, taken, job.limit)
    num_tokens = ingested.num_tokens[taken].astype(np.int32)
    _check_positions(num_tokens, job)
    edges = _edges(num_tokens, config.buckets)
    bucket_ids = assign_buckets(num_tokens, edges)
    layout = build_layout(
        num_tokens,
        bucket_ids,
        edges.tolist(),
        bytes_per_token=job.shape.bytes_per_token,
        codec=config.store.codec,
        forward_token_budget=config.forward.token_budget,
    )
    conversation_ids = [ingested.conversation_ids[i] for i in taken]
    held_out = choose_split(conversation_ids, data.validation_fraction, data.min_validation_samples)
    frame = pl.DataFrame(
        {
            "sample_id": [ingested.sample_ids[i] for i in taken],
            "conversation_id": conversation_ids,
            "source": [ingested.sources[i] for i in taken],
            "source_row": ingested.source_rows[taken],
            "split": np.where(held_out, VALIDATION, TRAIN).tolist(),
            "bucket_id": bucket_ids,
            "shard_id": layout.shard_ids,
            "forward_id": layout.forward_ids,
            "start": layout.starts,
            "num_tokens": num_tokens,
            "num_supervised_tokens": ingested.num_supervised_tokens[taken],
            "num_valid_anchors": ingested.num_valid_anchors[taken],
        },
        schema_overrides=INDEX_SCHEMA,
    )
    return Places(
        index=frame[layout.row_order],
        positions=taken[layout.row_order],
        layout=layout,
        dropped=dropped,
        accounting=accounting,
    )


def take_samples(sample_ids: list[str], limit: int | None) -> NDArray[np.int64]:
    """Positions of the samples to keep, in input order: all, or the first ``limit`` by content hash."""
    if limit is None or limit >= len(sample_ids):
        return np.arange(len(sample_ids), dtype=np.int64)
    by_hash = sorted(range(len(sample_ids)), key=sample_ids.__getitem__)
    return np.sort(np.array(by_hash[:limit], dtype=np.int64))


def _drop_over_limit(
    ingested: Ingested, taken: NDArray[np.int64], limit: int | None
) -> tuple[pl.DataFrame, Accounting]:
    if len(taken) == len(ingested.num_tokens):
        return ingested.dropped, ingested.accounting
    kept = set(ingested.row_numbers[taken].tolist())
    first_samples = np.unique(ingested.row_numbers, return_index=True)[1]
    left = [i for i in first_samples.tolist() if int(ingested.row_numbers[i]) not in kept]
    rows = [(ingested.sources[i], int(ingested.source_rows[i])) for i in left]
    dropped = drop_rows(ingested.dropped, rows, OVER_LIMIT, f"beyond the {limit} samples of --limit")
    before = ingested.accounting
    return dropped, account(before.kept - len(left), before.merged, dropped)


def _check_positions(num_tokens: NDArray[np.int32], job: Job) -> None:
    known = job.target.max_tokens
    if known is not None and num_tokens.max() > known:
        raise ConfigError(
            f"data.max_tokens = {job.data.max_tokens}: the longest sample has {num_tokens.max()} tokens, but the "
            f"target knows only {known} positions; set data.max_tokens to {known} or less"
        )


def _edges(num_tokens: NDArray[np.int32], buckets: BucketsSection) -> NDArray[np.int64]:
    if buckets.edges is None:
        choose = choose_edges if buckets.rule == "equal_tokens" else choose_edges_optimal
        return choose(num_tokens, buckets.count)
    edges = np.array(buckets.edges, dtype=np.int64)
    if np.any(np.diff(edges) < 1):
        raise ConfigError(f"buckets.edges = {list(buckets.edges)}: must ascend; sort them and list each once")
    if num_tokens.max() > edges[-1]:
        raise ConfigError(
            f"buckets.edges = {list(buckets.edges)}: the longest sample has {num_tokens.max()} tokens, more than the "
            "last edge; raise that edge, or lower data.max_tokens"
        )
    return edges
