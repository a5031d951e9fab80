"""Zarr and bytes: layout, shard writer, reader, codecs, verify."""

from dflash_tools.store.reader import Sample, Store, open_store

__all__ = ["Sample", "Store", "open_store"]
