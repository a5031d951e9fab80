"""Every kind of file: the rows that come out, and what is said about what does not."""

import gzip
import json
import os

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from dflash_tools.data.files import sniff
from dflash_tools.data.json_rows import read_json_rows
from dflash_tools.errors import ConfigError, DataError

BOM = b"\xef\xbb\xbf"


def rows(count, start=0):
    return [{"text": f"row number {number}"} for number in range(start, start + count)]


def lines(count, start=0):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows(count, start))


def zstd(data):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def read_bytes(read_files, tmp_path, tokenizer):
    """Read a file of these bytes: texts of the kept rows, and (row, reason) of the others."""

    def read(data, name="a.jsonl", **settings):
        (tmp_path / name).write_bytes(data)
        results = read_files(tmp_path, name, **settings)
        texts = [tokenizer.decode(sample.input_ids) for result in results for sample in result.samples]
        return texts, [(result.source_row, result.reason) for result in results if result.status == "dropped"]

    return read


def texts(count, start=0):
    return [row["text"] for row in rows(count, start)]


ALL = json.dumps(rows(3)).encode()


@pytest.mark.parametrize(
    "data",
    [
        lines(3),
        lines(3).rstrip(),
        lines(3).replace(b"\n", b"\r\n"),
        lines(3).replace(b"\n", b"\n\n  \n"),
        BOM + lines(3),
        BOM + lines(2) + BOM + lines(1, 2),
        ALL,
        b"\n  " + ALL + b"\n",
        BOM + ALL,
        json.dumps(rows(3), indent=2).encode(),
        b"".join(json.dumps([row]).encode() + b"\n" for row in rows(3)),
        json.dumps([[{"text": row["text"]}] for row in rows(3)]).encode(),
        b"\n".join(json.dumps(row, indent=1).encode() for row in rows(3)),
        gzip.compress(lines(3)),
        gzip.compress(lines(2)) + gzip.compress(lines(1, 2)),
        zstd(lines(3)),
        zstd(lines(2)) + zstd(lines(1, 2)),
        gzip.compress(ALL),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_the_same_rows_come_out_of_every_wrapping(read_bytes, data, name):
    """DI-05, DI-17, DI-20: kinds are told by content, never by name."""
    assert read_bytes(data, name) == (texts(3), [])


def test_an_array_of_turn_lists_and_a_list_per_line_are_conversations(read_files, tmp_path):
    """DI-05."""
    chats = [
        [{"role": "user", "content": f"q {number}"}, {"from": "gpt", "value": f"answer {number}"}]
        for number in range(3)
    ]
    (tmp_path / "array.json").write_text(json.dumps(chats))
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (tmp_path / "one.json").write_text(json.dumps(chats[0], indent=2))
    array, per_line, one = (read_files(tmp_path, name) for name in ("array.json", "lines.jsonl", "one.json"))
    assert [len(array), len(per_line), len(one)] == [3, 3, 1]
    ids = [[result.samples[0].conversation_id for result in results] for results in (array, per_line, one)]
    assert ids[0] == ids[1]
    assert ids[2] == ids[0][:1]


def test_a_line_number_names_a_bad_row_and_blank_lines_count(read_bytes):
    assert read_bytes(b"\n" + lines(1) + b"{bad\n" + lines(1, 1)) == (texts(2), [(3, "invalid_json")])


def test_a_bad_element_of_an_array_loses_only_itself(read_bytes, read_files, tmp_path):
    data = b'[{"text": "row number 0"},\n{"text": nope},\n{"text": "row number 1"}, 7, null, "x"]'
    dropped = [(2, "invalid_json"), (4, "not_an_object"), (5, "not_an_object"), (6, "not_an_object")]
    assert read_bytes(data) == (texts(2), dropped)
    assert read_files(tmp_path, "a.jsonl")[1].detail.startswith("line 2: ")


@pytest.mark.parametrize("cut", [1, 9, 30])
def test_rows_before_the_cut_of_an_array_are_kept_and_the_cut_is_reported(read_bytes, cut):
    data = json.dumps(rows(5)).encode()[:-cut]
    kept, dropped = read_bytes(data)
    assert kept == texts(len(kept))
    assert len(kept) == {1: 5, 9: 4, 30: 3}[cut]
    assert dropped == [(len(kept) + 1, "damaged_file")]


@pytest.mark.parametrize(("pack", "lost_rows"), [(gzip.compress, 60), (zstd, 4000)])
def test_a_packed_file_that_is_cut_keeps_what_can_be_unpacked_and_says_so(tmp_path, pack, lost_rows):
    """DI-19: zstd packs in blocks of 128 KiB, the last one is lost whole."""
    data = pack(b"".join(b'{"text": "row %d %s"}\n' % (n, os.urandom(8).hex().encode()) for n in range(20_000)))
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(data[:-20])
    *good, last = read_json_rows(path, sniff(path, "cut"), "cut")
    assert len(good) > 20_000 - lost_rows
    assert [row.source_row for row in good] == list(range(1, len(good) + 1))
    assert all(json.loads(row.content) for row in good)
    assert (last.source_row, last.content) == (len(good) + 1, None)
    assert "runcated" in last.damage


def test_strict_stops_at_a_cut(read_bytes):
    with pytest.raises(DataError, match=r"a\.jsonl:3: damaged_file.*lost"):
        read_bytes(gzip.compress(lines(2))[:-5], strict=True)


def test_names_that_lie_about_packing(read_bytes):
    """DI-19."""
    assert read_bytes(lines(2), "a.jsonl.gz") == (texts(2), [])
    assert read_bytes(gzip.compress(lines(2)), "b.jsonl") == (texts(2), [])


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"BZh91AY", "bzip2"),
        (b"PK\x03\x04", "zip"),
        (b"\xff\xfe{\0", "UTF-16"),
        (b"version https://git-lfs", "git lfs"),
    ],
)
def test_other_kinds_of_files_are_refused_by_name(read_bytes, head, words):
    with pytest.raises(DataError, match=words):
        read_bytes(head + bytes(50))


def test_unicode_line_separators_and_nuls_do_not_end_a_row(read_bytes):
    row = json.dumps({"text": "a\u2028b\u2029c\x85d\x00e"}, ensure_ascii=False).encode() + b"\n"
    assert read_bytes(row * 2 + bytes(40) + b"\n") == (["a\u2028b\u2029c\x85d\x00e"] * 2, [(3, "invalid_json")])


def test_lone_surrogates_are_replaced_and_counted(read_files, tmp_path, tokenizer):
    """DI-16."""
    (tmp_path / "a.jsonl").write_bytes(rb'{"text": "x\udcb2y ok \ud83d"}' + b"\n" + rb'{"text": "\ud83d\udc4d up"}')
    first, second = read_files(tmp_path, "a.jsonl")
    assert tokenizer.decode(first.samples[0].input_ids) == "x\ufffdy ok \ufffd"
    assert first.notes == ("lone surrogates replaced",)
    assert tokenizer.decode(second.samples[0].input_ids) == "👍 up"
    assert second.notes == ()


def test_bytes_that_are_no_utf8_drop_their_row(read_bytes):
    assert read_bytes(b'{"text": "\xff\xfe"}\n' + lines(1)) == (texts(1), [(1, "invalid_utf8")])


@pytest.mark.parametrize("data", [lines(1), json.dumps(rows(1)).encode()])
def test_a_very_long_row_leaves_its_neighbours_alone(read_bytes, data):
    """DI-28, TK-05."""
    long = {"text": "_" * 5_000_000}
    data = b"".join(json.dumps(row).encode() + b"\n" for row in (rows(1)[0], long, rows(1, 1)[0]))
    kept, dropped = read_bytes(data, max_tokens=64)
    assert (kept[0], kept[2]) == (texts(1)[0], texts(1, 1)[0])
    assert set(kept[1]) == {"_"}
    assert dropped == []


def write_parquet(path, content, **options):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path, **options)


CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"q {number}"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
            },
        ]
    }
    for number, arguments in enumerate([{"city": "P"}, {"ids": [1, 2]}] * 150)
]


@pytest.mark.parametrize("kind", ["parquet", "arrow file", "arrow stream"])
def test_columnar_files_give_the_rows_of_jsonl(family, read_files, tmp_path, kind):
    """DI-22, DI-23: fields that other rows have do not appear in this one."""
    table = pyarrow.Table.from_pylist(CHATS)
    if kind == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "a", row_group_size=100)
    else:
        new = pyarrow.ipc.new_file if kind == "arrow file" else pyarrow.ipc.new_stream
        with new(tmp_path / "a", table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    tokenizer = family("qwen2")
    columnar, jsonl = (read_files(tmp_path, name, tokenizer=tokenizer) for name in ("a", "b.jsonl"))
    assert len(columnar) == 300
    assert "ids" not in tokenizer.decode(columnar[0].samples[0].input_ids)
    for left, right in zip(columnar, jsonl, strict=True):
        assert left.samples[0].conversation_id == right.samples[0].conversation_id
        assert left.samples[0].input_ids.tolist() == right.samples[0].input_ids.tolist()


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path, read_files):
    write_parquet(tmp_path / "a.parquet", rows(3))
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data[:-30])
    with pytest.raises(DataError, match=r"a\.parquet: no row can be read as parquet"):
        read_files(tmp_path, "a.parquet")


def test_a_folder_is_read_in_path_order_whatever_its_files_hold(read_files, tmp_path):
    """DI-26."""
    folder = tmp_path / "chats"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.jsonl").write_bytes(lines(1, 1))
    (folder / "sub" / "c.jsonl.gz").write_bytes(gzip.compress(lines(1, 2)))
    write_parquet(folder / "a.parquet", [{**rows(1)[0], "tools": ["x"], "extra": 3}])
    (folder / "README.md").write_text("not data")
    results = read_files(tmp_path, "chats")
    assert [result.source for result in results] == ["chats/a.parquet", "chats/b.jsonl", "chats/sub/c.jsonl.gz"]
    assert [result.source for result in read_files(tmp_path, "chats/*.jsonl")] == ["chats/b.jsonl"]
    absolute = read_files(tmp_path, str(folder / "**/*.gz"))
    assert [result.source for result in absolute] == [str(folder / "sub/c.jsonl.gz")]


def test_a_source_that_is_not_there_is_named(read_files, tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.jsonl: not found below"):
        read_files(tmp_path, "nothing.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no file below"):
        read_files(tmp_path, "empty")


def test_an_empty_file_has_no_rows(read_bytes):
    assert read_bytes(b"") == ([], [])
    assert read_bytes(b"[]") == ([], [])
    assert read_bytes(gzip.compress(b"")) == ([], [])
