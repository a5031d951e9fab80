"""The end of an extraction: the manifest, and the figures that a command prints."""

from pathlib import Path
from typing import Any

from dflash_tools.contracts.manifest import StoreManifest
from dflash_tools.errors import StoreError
from dflash_tools.extract.forward import MEMORY_NAME
from dflash_tools.extract.record import ExtractionRecord
from dflash_tools.extract.target_folder import read_identity
from dflash_tools.store.commit import committed_shards
from dflash_tools.store.writer import StoreWriter


def finish_store(store: Path, writer: StoreWriter, record: ExtractionRecord, settings: dict[str, Any]) -> StoreManifest:
    """Write the manifest: from here on the store is complete.

    Args:
        store: The store's folder.
        writer: With every shard of the index committed.
        record: What the store is of.
        settings: As in the record.

    Raises:
        StoreError: If a shard or the target folder is missing.
    """
    identity = read_identity(store)
    if identity is None:
        raise StoreError(f"{store}: STORE/target is missing; run extract again")
    (store / MEMORY_NAME).unlink(missing_ok=True)
    index = writer.index
    manifest = StoreManifest(
        target=identity,
        target_layer_ids=record.target_layer_ids,
        hidden_size=record.hidden_size,
        hidden_states_dtype=writer.shape.hidden_states_dtype,
        codec=writer.shape.codec,
        last_hidden_state="pre_norm" if writer.shape.last_hidden_state else None,
        tokenizer=record.tokenizer,
        data=record.data,
        accounting=record.accounting,
        buckets=record.buckets,
        num_samples=len(index),
        num_tokens=int(index["num_tokens"].sum()),
        num_supervised_tokens=int(index["num_supervised_tokens"].sum()),
        num_bytes=0,
        forward_token_budget=int(settings["forward.token_budget"]),
        threads=record.threads,
        index_fingerprint=record.index_fingerprint,
        versions=record.versions,
        files={},
    )
    return writer.finish(manifest)


def summarise(store: Path, manifest: StoreManifest, record: ExtractionRecord | None) -> dict[str, Any]:
    """Figures of a finished store, as ``extract`` prints them."""
    accounting = manifest.accounting
    return {
        "store": str(store),
        "read": accounting.read,
        "kept": accounting.kept,
        "dropped": accounting.dropped,
        "merged": accounting.merged,
        "dropped_by_reason": accounting.dropped_by_reason,
        "notes": record.notes if record else {},
        "num_samples": manifest.num_samples,
        "num_tokens": manifest.num_tokens,
        "num_supervised_tokens": manifest.num_supervised_tokens,
        "target_layer_ids": list(manifest.target_layer_ids),
        "num_bytes": manifest.num_bytes,
        "num_shards": len(committed_shards(store)),
        "closed": bool(record and record.closed),
        "fingerprint": manifest.fingerprint(),
    }
