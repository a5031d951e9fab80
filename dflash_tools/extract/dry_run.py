"""What an extraction would do, before any model loads: rows, samples, tokens, bytes, and whether they fit."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_tools.data import read_rows
from dflash_tools.extract.estimate import SPARE_BYTES, count_files, estimate_buckets, free_bytes, what_fits
from dflash_tools.extract.ingest import ingest
from dflash_tools.extract.job import Job
from dflash_tools.extract.places import choose_places


def plan_extraction(job: Job, store: Path, *, strict: bool) -> dict[str, Any]:
    """Read all rows and choose all places; write nothing.

    Args:
        job: What would be extracted.
        store: Where it would be written; need not exist.
        strict: Stop at the first row that would be dropped.
    """
    with tempfile.TemporaryDirectory(prefix="dflash-tools-") as folder:
        ingested = ingest(read_rows(job.data, job.tokenizer, strict=strict), Path(folder) / "spool")
        ingested.spool.remove()
    places = choose_places(ingested, job)
    index = places.index
    buckets = estimate_buckets(
        index["num_tokens"].to_numpy(), index["bucket_id"].to_numpy(), places.layout.buckets, job.shape
    )
    num_bytes = sum(bucket.num_bytes for bucket in buckets)
    free = free_bytes(store)
    fits = num_bytes + SPARE_BYTES <= free
    accounting = places.accounting
    return {
        "read": accounting.read,
        "kept": accounting.kept,
        "dropped": accounting.dropped,
        "merged": accounting.merged,
        "dropped_by_reason": accounting.dropped_by_reason,
        "notes": ingested.notes,
        "num_samples": len(index),
        "num_tokens": int(index["num_tokens"].sum()),
        "num_supervised_tokens": int(index["num_supervised_tokens"].sum()),
        "num_validation_samples": int((index["split"] == "validation").sum()),
        "target_layer_ids": list(job.layer_ids),
        "bytes_per_token": job.shape.bytes_per_token,
        "num_bytes": num_bytes,
        "num_files": count_files(places.layout.buckets, job.shape),
        "free_bytes": free,
        "fits": fits,
        "would_fit": [] if fits else what_fits(num_bytes, job.shape, free),
        "buckets": [asdict(bucket) for bucket in buckets],
    }
