import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.data import RowResult, TokenSample, sample_id
from dflash_tools.errors import DataError
from dflash_tools.extract.ingest import count_valid_anchors, ingest


def row(number, *masks, status="kept", reason=""):
    samples = tuple(
        TokenSample(
            input_ids=np.arange(len(mask), dtype=np.int32) + 10 * len(mask),
            loss_mask=np.array(mask, dtype=np.uint8),
            conversation_id=f"{number:032x}",
        )
        for mask in masks
    )
    return RowResult(source="a.jsonl", source_row=number, status=status, samples=samples, reason=reason)


def sample_has_anchor(entry):
    return any(count_valid_anchors(sample.loss_mask) for sample in entry.samples)


MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
ROWS = st.lists(
    st.one_of(st.lists(MASKS, min_size=1, max_size=3), st.sampled_from(["broken", "too_long"])), min_size=1, max_size=12
)


@given(ROWS)
def test_every_row_is_kept_or_dropped_with_a_reason(tmp_path_factory, spec):
    rows = [
        row(number, status="dropped", reason=entry) if isinstance(entry, str) else row(number, *entry)
        for number, entry in enumerate(spec, start=1)
    ]
    folder = tmp_path_factory.mktemp("spool") / "spool"
    if not any(sample_has_anchor(entry) for entry in rows):
        with pytest.raises(DataError, match=f"none of {len(rows)} rows"):
            ingest(rows, folder)
        return
    ingested = ingest(rows, folder)
    accounting = ingested.accounting
    assert accounting.kept + accounting.dropped + accounting.merged == accounting.read == len(rows)
    assert sum(accounting.dropped_by_reason.values()) == accounting.dropped == len(ingested.dropped)
    kept = [entry for entry in rows if sample_has_anchor(entry)]
    samples = [sample for entry in kept for sample in entry.samples]
    assert accounting.kept == len(kept)
    assert ingested.num_tokens.tolist() == [len(sample.input_ids) for sample in samples]
    for position, sample in enumerate(samples):
        ids, mask = ingested.spool.read(position)
        assert (ids.tolist(), mask.tolist()) == (sample.input_ids.tolist(), sample.loss_mask.tolist())
    assert len(set(ingested.sample_ids)) == len(samples)
    ingested.spool.remove()
    assert not folder.exists()


def test_equal_samples_get_ids_of_their_own(tmp_path):
    ingested = ingest([row(1, [0, 1, 1]), row(2, [0, 1, 1]), row(3, [1, 1])], tmp_path / "spool")
    ids, mask = ingested.spool.read(0)
    assert ingested.sample_ids[:2] == [sample_id(ids, mask, 0), sample_id(ids, mask, 1)]


def test_a_row_without_two_supervised_tokens_in_a_row_is_dropped_with_that_reason(tmp_path):
    ingested = ingest([row(1, [1, 0, 1, 0]), row(2, [0, 1, 1])], tmp_path / "spool")
    assert ingested.accounting.dropped_by_reason == {"too_few_supervised": 1}
    assert ingested.dropped["source_row"].to_list() == [1]


def test_data_without_any_sample_is_refused_with_the_commonest_reason(tmp_path):
    rows = [row(1, status="dropped", reason="broken"), row(2, status="dropped", reason="broken"), row(3, [1])]
    with pytest.raises(DataError, match="none of 3 rows became a sample; 2 were dropped as broken"):
        ingest(rows, tmp_path / "spool")
    with pytest.raises(DataError, match="no rows at all"):
        ingest([], tmp_path / "spool")


@pytest.mark.parametrize(("mask", "expected"), [([], 0), ([1], 0), ([1, 1], 1), ([1, 0, 1, 1, 1], 2)])
def test_a_valid_anchor_is_a_supervised_token_before_another(mask, expected):
    assert count_valid_anchors(np.array(mask, dtype=np.uint8)) == expected
