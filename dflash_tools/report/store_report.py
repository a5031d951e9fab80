"""``report store``: what is cached, from manifest, index and the list of dropped rows."""

from pathlib import Path

import numpy as np
import polars as pl

from dflash_tools.contracts.index import TRAIN, VALIDATION
from dflash_tools.contracts.manifest import StoreManifest
from dflash_tools.report.columns import total_of
from dflash_tools.report.diagnosis import Finding, choose_sentences
from dflash_tools.report.document import Chart, Report, Section, Table, keep
from dflash_tools.report.plan_sections import length_chart
from dflash_tools.report.sources import read_store

DROPPED_NAME = "dropped.parquet"
BUCKETS_DIR = "buckets"
_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)

# Thresholds of the diagnosis.
MANY_DROPPED = 0.05  # of input rows
WITHOUT_ANCHOR = 0.01  # of samples
FEW_SUPERVISED = 0.10  # of tokens
SLACK = 0.05  # of a bucket's axis
AT_THE_LIMIT = 0.05  # of samples with exactly max_tokens


def report_store(path: Path) -> Report:
    """Report on a finished store.

    Raises:
        StoreError: If the store is missing, unfinished or damaged.
    """
    manifest, index = read_store(path)
    buckets = _bucket_frame(path, manifest, index)
    dropped = _dropped_frame(path)
    return Report(
        kind="store",
        title="Store of hidden states",
        subject=str(path),
        figures=_figures(manifest, index, buckets),
        diagnosis=choose_sentences(_findings(manifest, index, buckets)),
        sections=(
            Section(
                title="Buckets",
                text="Samples of one length range share a group of arrays.",
                parts=keep(
                    Table(
                        name="buckets", title="Buckets", frame=buckets, note="Axis: tokens on disk, alignment included."
                    ),
                    _share_chart(buckets),
                ),
            ),
            Section(
                title="Lengths",
                parts=keep(length_chart(index.get_column("num_tokens").to_numpy()), _quantile_table(index)),
            ),
            Section(
                title="Sources",
                parts=(
                    _group_table(index, "source", "sources", "Samples by source"),
                    _group_table(index, "split", "splits", "Samples by split"),
                ),
            ),
            Section(
                title="Rows that became no sample",
                text=_accounting_sentence(manifest),
                parts=keep(Table(name="dropped", title="Dropped rows by reason", frame=dropped)),
            ),
            Section(title="Identity", parts=(_identity_table(manifest),)),
        ),
    )


def _figures(manifest: StoreManifest, index: pl.DataFrame, buckets: pl.DataFrame) -> dict[str, object]:
    return {
        "num_samples": manifest.num_samples,
        "num_training_samples": int((index.get_column("split") == TRAIN).sum()),
        "num_validation_samples": int((index.get_column("split") == VALIDATION).sum()),
        "num_tokens": manifest.num_tokens,
        "num_supervised_tokens": manifest.num_supervised_tokens,
        "num_valid_anchors": total_of(index, "num_valid_anchors"),
        "store_bytes": manifest.num_bytes,
        "num_bytes_per_token": round(manifest.num_bytes / max(manifest.num_tokens, 1)),
        "target": manifest.target.model,
        "target_layer_ids": list(manifest.target_layer_ids),
        "hidden_states_dtype": manifest.hidden_states_dtype,
        "codec": manifest.codec,
        "rows": manifest.accounting.model_dump(),
        "buckets": buckets.to_dicts(),
        "store_fingerprint": manifest.fingerprint(),
    }


def _bucket_frame(path: Path, manifest: StoreManifest, index: pl.DataFrame) -> pl.DataFrame:
    layouts = pl.DataFrame(
        [
            {
                "bucket_id": layout.bucket_id,
                "min_tokens": layout.min_tokens,
                "max_tokens": layout.max_tokens,
                "num_samples": layout.num_samples,
                "num_tokens": layout.num_tokens,
                "stored_bytes": _folder_bytes(path / BUCKETS_DIR / str(layout.bucket_id)),
                "num_axis_tokens": layout.axis_tokens,
                "num_shards": layout.num_shards,
                "chunk_tokens": layout.chunk_tokens,
            }
            for layout in manifest.buckets
        ],
        schema_overrides={"stored_bytes": pl.Int64},
    )
    held = index.group_by(pl.col("bucket_id").cast(pl.Int64)).agg(
        pl.col("num_supervised_tokens").cast(pl.Int64).sum(), pl.col("num_valid_anchors").cast(pl.Int64).sum()
    )
    shares = {
        "num_samples": "share_of_samples",
        "num_tokens": "share_of_tokens",
        "num_supervised_tokens": "share_of_supervised_tokens",
    }
    return (
        layouts.join(held, on="bucket_id", how="left")
        .sort("bucket_id")
        .with_columns(pl.col("num_supervised_tokens", "num_valid_anchors").fill_null(0))
        .with_columns((pl.col(name) / pl.col(name).sum()).fill_nan(0.0).alias(share) for name, share in shares.items())
    )


def _folder_bytes(folder: Path) -> int | None:
    """Bytes of all files of a folder, by their sizes alone; None if it is not there."""
    if not folder.is_dir():
        return None
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _share_chart(buckets: pl.DataFrame) -> Chart:
    names = {
        "share_of_samples": "samples",
        "share_of_tokens": "tokens",
        "share_of_supervised_tokens": "supervised tokens",
    }
    frame = buckets.with_columns(pl.format("bucket {}", "bucket_id").alias("bucket")).unpivot(
        list(names), index="bucket", variable_name="of", value_name="share"
    )
    return Chart(
        name="bucket_shares",
        title="Share of each bucket",
        description="Bars per bucket: share of samples, of tokens and of supervised tokens.",
        kind="bars",
        frame=frame.with_columns(pl.col("of").replace_strict(names, return_dtype=pl.String)),
        x="bucket",
        y="share",
        color="of",
    )


def _quantile_table(index: pl.DataFrame) -> Table:
    columns = ("num_tokens", "num_supervised_tokens", "num_valid_anchors")
    frame = pl.DataFrame(
        {
            "quantile": [f"{share:.0%}" for share in _QUANTILES],
            **{name: np.quantile(index.get_column(name).to_numpy(), _QUANTILES, method="nearest") for name in columns},
        }
        if len(index)
        else {"quantile": []}
    )
    return Table(name="quantiles", title="Samples by quantile", frame=frame)


def _group_table(index: pl.DataFrame, column: str, name: str, title: str) -> Table:
    frame = (
        index.group_by(column)
        .agg(
            pl.len().cast(pl.Int64).alias("num_samples"),
            pl.col("num_tokens", "num_supervised_tokens", "num_valid_anchors").cast(pl.Int64).sum(),
        )
        .sort(column)
    )
    return Table(name=name, title=title, frame=frame)


def _dropped_frame(path: Path) -> pl.DataFrame:
    file = path / DROPPED_NAME
    if not file.is_file():
        return pl.DataFrame()
    return (
        pl.scan_parquet(file, glob=False)
        .group_by("reason")
        .agg(pl.len().cast(pl.Int64).alias("num_rows"))
        .sort("num_rows", "reason", descending=[True, False])
        .collect()
    )


def _accounting_sentence(manifest: StoreManifest) -> str:
    rows = manifest.accounting
    return (
        f"{rows.read:,} rows read = {rows.kept:,} kept + {rows.dropped:,} dropped + {rows.merged:,} merged into "
        "other samples; "
        f"they became {manifest.num_samples:,} samples."
    )


def _identity_table(manifest: StoreManifest) -> Table:
    target, data, tokenizer = manifest.target, manifest.data, manifest.tokenizer
    rows = {
        "target": target.model,
        "revision": target.revision or "–",
        "architecture": target.architecture,
        "target layers": ", ".join(str(layer) for layer in manifest.target_layer_ids)
        + f" of {target.num_hidden_layers}",
        "hidden size": str(manifest.hidden_size),
        "dtype of the forward": target.dtype + (f" ({target.quantization})" if target.quantization else ""),
        "dtype on disk": f"{manifest.hidden_states_dtype}, codec {manifest.codec}",
        "last hidden state": manifest.last_hidden_state or "not kept",
        "data": data.name,
        "loss on": data.loss_on,
        "longest sample allowed": f"{data.max_tokens:,} tokens, longer ones: {data.too_long}",
        "tokenizer": tokenizer.fingerprint[:16],
        "chat template": (tokenizer.chat_template_fingerprint or "none")[:16],
        "index": manifest.index_fingerprint[:16],
        "store": manifest.fingerprint()[:16],
        **{f"version of {name}": version for name, version in manifest.versions.items()},
    }
    return Table(
        name="identity", title="Identity", frame=pl.DataFrame({"what": list(rows), "value": list(rows.values())})
    )


def _findings(manifest: StoreManifest, index: pl.DataFrame, buckets: pl.DataFrame) -> list[Finding]:
    findings = []
    rows, data = manifest.accounting, manifest.data
    if rows.read and rows.dropped / rows.read > MANY_DROPPED:
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in rows.dropped_by_reason.items())
        findings.append(
            Finding(
                rule="many_dropped",
                weight=rows.dropped / rows.read,
                sentence=(
                    f"{rows.dropped:,} of {rows.read:,} input rows ({rows.dropped / rows.read:.0%}) were dropped: "
                    f"{reasons}; dropped.parquet names each."
                ),
            )
        )
    blind = int((index.get_column("num_valid_anchors") == 0).sum())
    if blind > WITHOUT_ANCHOR * max(len(index), 1):
        findings.append(
            Finding(
                rule="without_anchor",
                weight=blind / len(index),
                sentence=(
                    f"{blind:,} samples ({blind / len(index):.1%}) have no two supervised tokens in a row and teach "
                    "nothing; check data.loss_on and the chat template."
                ),
            )
        )
    supervised = manifest.num_supervised_tokens / max(manifest.num_tokens, 1)
    if supervised < FEW_SUPERVISED:
        findings.append(
            Finding(
                rule="few_supervised",
                weight=0.5,
                sentence=(
                    f"Only {supervised:.1%} of the cached tokens are supervised: the store is mostly prompts; check "
                    "data.loss_on and the chat template."
                ),
            )
        )
    cut = int((index.get_column("num_tokens") == data.max_tokens).sum())
    if data.too_long == "truncate" and cut > AT_THE_LIMIT * max(len(index), 1):
        findings.append(
            Finding(
                rule="at_the_limit",
                weight=cut / len(index),
                sentence=(
                    f"{cut:,} samples ({cut / len(index):.0%}) have exactly data.max_tokens = {data.max_tokens:,} "
                    "tokens, so they were probably cut; raise it or split them."
                ),
            )
        )
    slack = 1 - manifest.num_tokens / max(total_of(buckets, "num_axis_tokens"), 1)
    if slack > SLACK and manifest.num_bytes > 10**9:
        findings.append(
            Finding(
                rule="slack",
                weight=slack,
                sentence=f"Alignment takes {slack:.0%} of the token axis; its chunks are large for samples this short.",
            )
        )
    if not (index.get_column("split") == VALIDATION).any():
        findings.append(
            Finding(
                rule="no_validation",
                weight=0.4,
                sentence=(
                    "No sample is held out, so a run on this store has no held-out loss; set "
                    "data.validation_fraction or data.min_validation_samples."
                ),
            )
        )
    return findings
