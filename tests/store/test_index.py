import polars as pl
import pytest

from dflash_tools.errors import StoreError
from dflash_tools.store.index import (
    INDEX_SCHEMA,
    index_fingerprint,
    read_index,
    rows_by_shard,
    write_index,
)


def make_index(num_rows: int = 4) -> pl.DataFrame:
    columns = {
        name: [f"{name} {i}" if dtype == pl.String() else i for i in range(num_rows)]
        for name, dtype in INDEX_SCHEMA.items()
    }
    return pl.DataFrame(columns, schema=INDEX_SCHEMA, strict=False)


def test_what_is_written_is_read(tmp_path):
    index = make_index()
    write_index(tmp_path, index)
    assert read_index(tmp_path).equals(index)


def test_equal_frames_give_equal_bytes_however_they_were_put_together(tmp_path):
    index = make_index()
    write_index(tmp_path, index)
    content = (tmp_path / "index.parquet").read_bytes()
    write_index(tmp_path, pl.concat([index[:1], index[1:]], rechunk=False))
    assert (tmp_path / "index.parquet").read_bytes() == content


def test_the_fingerprint_sees_every_column_and_the_order():
    index = make_index()
    seen = {index_fingerprint(index), index_fingerprint(index[::-1])}
    for name, dtype in INDEX_SCHEMA.items():
        value = pl.lit("x" if dtype == pl.String() else 77).cast(dtype)
        seen.add(index_fingerprint(index.with_columns(value.alias(name))))
    assert len(seen) == 2 + len(INDEX_SCHEMA)


def test_the_fingerprint_sees_where_one_text_ends():
    index = make_index(2)
    first = index.with_columns(source=pl.Series(["ab", "c"]))
    second = index.with_columns(source=pl.Series(["a", "bc"]))
    assert index_fingerprint(first) != index_fingerprint(second)


def test_an_empty_index_is_an_index(tmp_path):
    write_index(tmp_path, make_index(0))
    assert len(read_index(tmp_path)) == 0
    assert rows_by_shard(read_index(tmp_path)) == {}


def test_other_columns_are_refused(tmp_path):
    with pytest.raises(ValueError, match="index columns are"):
        write_index(tmp_path, make_index().drop("split"))
    make_index().drop("split").write_parquet(tmp_path / "index.parquet")
    with pytest.raises(StoreError, match="Extract again"):
        read_index(tmp_path)


def test_a_missing_or_unreadable_index_says_what_to_do(tmp_path):
    with pytest.raises(StoreError, match=r"index.parquet: missing; restore"):
        read_index(tmp_path)
    (tmp_path / "index.parquet").write_bytes(b"no parquet")
    with pytest.raises(StoreError, match="cannot be read as Parquet"):
        read_index(tmp_path)


def test_rows_of_a_shard_are_one_range():
    index = make_index(5).with_columns(
        bucket_id=pl.Series([0, 0, 0, 2, 2], dtype=pl.Int32), shard_id=pl.Series([0, 0, 1, 0, 0], dtype=pl.Int32)
    )
    assert rows_by_shard(index) == {(0, 0): (0, 2), (0, 1): (2, 3), (2, 0): (3, 5)}
    with pytest.raises(ValueError, match="ordered"):
        rows_by_shard(index[[0, 2, 1]])
