import pytest
from make_store import make_store
from report.made import log_normal_lengths, make_index_store

from dflash_tools.errors import StoreError
from dflash_tools.report import report_store


def test_what_is_cached_is_counted_by_bucket_source_and_split(store):
    report = report_store(store)
    assert report.figures["num_samples"] == 1500
    assert report.figures["num_validation_samples"] == 4
    assert report.table("buckets").get_column("num_samples").sum() == 1500
    assert report.table("buckets").get_column("share_of_tokens").sum() == pytest.approx(1.0)
    assert dict(report.table("splits").select("split", "num_samples").iter_rows()) == {"train": 1496, "validation": 4}


def test_dropped_rows_are_counted_by_reason_and_add_up(store):
    report = report_store(store)
    assert dict(report.table("dropped").iter_rows()) == {"empty": 3, "too_short": 1}
    assert report.figures["rows"] == {
        "read": 1504,
        "kept": 1500,
        "dropped": 4,
        "merged": 0,
        "dropped_by_reason": {"empty": 3, "too_short": 1},
    }


def test_a_healthy_store_has_no_diagnosis(store):
    assert report_store(store).diagnosis == ()


def test_a_store_of_real_arrays_is_reported(tmp_path):
    report = report_store(make_store(tmp_path / "store", validation_rows=(1,), target=False))
    assert report.figures["num_samples"] == 12
    on_disk = sum(file.stat().st_size for file in (tmp_path / "store" / "buckets").rglob("*") if file.is_file())
    buckets = report.table("buckets").get_column("stored_bytes").sum()
    assert on_disk - 2000 < buckets <= on_disk  # all but the group's own zarr.json


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"dropped": {"too_long": 50}}, "50 of 150 input rows"),
        ({"num_validation": 0}, "No sample is held out"),
        ({"supervised_share": 0.02}, "tokens are supervised"),
        ({"lengths": [1] * 20 + [300] * 80, "edges": [300]}, "no two supervised tokens in a row"),
        ({"lengths": [300] * 80 + [100] * 20, "edges": [300], "max_tokens": 300}, "probably cut"),
    ],
)
def test_every_fault_of_a_store_is_named(tmp_path, faults, words):
    lengths = faults.pop("lengths", log_normal_lengths(100))
    report = report_store(make_index_store(tmp_path / "store", lengths, **faults))
    assert any(words in sentence for sentence in report.diagnosis)


def test_an_unfinished_store_is_refused(tmp_path):
    with pytest.raises(StoreError):
        report_store(tmp_path)
