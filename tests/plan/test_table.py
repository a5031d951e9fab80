import json

import numpy as np
import polars as pl
import pytest
from plan.plan_cases import lognormal_mix

from dflash_tools.errors import ResumeError
from dflash_tools.plan import PlanSettings, build_plan
from dflash_tools.plan.table import load_plan, plan_to_frame, save_plan


@pytest.fixture
def plan():
    return build_plan(*lognormal_mix(200), PlanSettings(num_epochs=2, max_steps=3), store_fingerprint="ab")


def test_a_plan_comes_back_to_the_bit(plan, tmp_path):
    save_plan(plan, tmp_path / "plan.parquet")
    again = load_plan(tmp_path / "plan.parquet")
    for name in ("epochs", "steps", "bucket_ids", "offsets", "sample_rows"):
        assert np.array_equal(getattr(again, name), getattr(plan, name))
        assert getattr(again, name).dtype == getattr(plan, name).dtype
        assert not getattr(again, name).flags.writeable
    assert (again.settings, again.store_fingerprint, again.left_out) == (plan.settings, "ab", plan.left_out)
    assert again.fingerprint() == plan.fingerprint()


def test_the_frame_has_a_row_per_batch(plan):
    frame = plan_to_frame(plan)
    assert frame.columns == ["epoch", "step", "bucket_id", "sample_rows"]
    assert frame["sample_rows"].to_list() == [plan.rows(batch).tolist() for batch in range(len(plan))]


def test_files_that_are_no_plan_are_refused(tmp_path):
    path = tmp_path / "plan.parquet"
    with pytest.raises(ResumeError, match="no such plan"):
        load_plan(path)
    path.write_bytes(b"hello")
    with pytest.raises(ResumeError, match="not a readable plan"):
        load_plan(path)
    pl.DataFrame({"a": [1]}).write_parquet(path)
    with pytest.raises(ResumeError, match="not a plan"):
        load_plan(path)


def test_another_schema_version_is_refused(plan, tmp_path):
    path = tmp_path / "plan.parquet"
    save_plan(plan, path)
    about = json.loads(pl.read_parquet_metadata(path)["dflash_tools_plan"]) | {"schema_version": 99}
    pl.read_parquet(path).write_parquet(path, metadata={"dflash_tools_plan": json.dumps(about)})
    with pytest.raises(ResumeError, match="schema version 99"):
        load_plan(path)


def test_a_changed_plan_is_refused(plan, tmp_path):
    path = tmp_path / "plan.parquet"
    save_plan(plan, path)
    metadata = {"dflash_tools_plan": pl.read_parquet_metadata(path)["dflash_tools_plan"]}
    pl.read_parquet(path).reverse().with_columns(pl.col("step").sort()).write_parquet(path, metadata=metadata)
    with pytest.raises(ResumeError, match="the file was changed"):
        load_plan(path)


def test_a_damaged_plan_is_refused_or_reads_the_same(plan, tmp_path):
    path = tmp_path / "plan.parquet"
    save_plan(plan, path)
    whole, generator = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        damaged, bit = bytearray(whole), int(generator.integers(8 * len(whole)))
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert load_plan(path).fingerprint() == plan.fingerprint()
        except ResumeError:
            refused += 1
    assert refused > 20
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ResumeError, match="not a readable plan"):
        load_plan(path)
