"""docs/data.md is true: its rows are read, its reasons are those of the code."""

import re
from pathlib import Path

import numpy as np
import pytest
from tiny_models import CHATML

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
TABLE = PAGE.split("| layout | row | supervised |")[1].split("\n\n")[0].splitlines()[2:]
EXAMPLES = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in TABLE]


@pytest.mark.parametrize(("layout", "row", "supervised"), EXAMPLES, ids=[example[0] for example in EXAMPLES])
def test_an_example_has_the_mask_that_the_page_shows(read_files, tmp_path, tokenizer, layout, row, supervised):
    assert tokenizer.chat_template == CHATML
    (tmp_path / "a.jsonl").write_text(row.strip("`"))
    (result,) = read_files(tmp_path, "a.jsonl")
    (sample,) = result.samples
    if layout == "token ids":
        assert sample.loss_mask.tolist() == [0, 1, 1]
        return
    borders = np.flatnonzero(np.diff(np.concatenate(([0], sample.loss_mask, [0])).astype(int)))
    runs = [tokenizer.decode(sample.input_ids[a:b]) for a, b in zip(borders[::2], borders[1::2], strict=True)]
    assert runs == [text.replace("\\|", "|") for text in re.findall("`([^`]*)`", supervised)]


def test_every_reason_and_note_of_the_code_stands_on_the_page_and_no_other():
    code = "".join(path.read_text() for path in (ROOT / "dflash_tools" / "data").glob("*.py"))
    reasons = set(re.findall(r'RowError\(\s*"(\w+)"', code)) | set(re.findall(r'reasons\.append\(\("(\w+)"', code))
    reasons |= set(re.findall(r'reason, detail = "(\w+)"', code))
    table = PAGE.split("| reason | meaning |")[1].split("\n\n")[0]
    described = {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert reasons == described
