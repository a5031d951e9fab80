"""Whatever the lengths and settings: every report can be made, printed, drawn and written as JSON."""

import io
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report.made import make_index_store, make_run
from rich.console import Console

from dflash_tools.config import LossSection, PlanSettings, TrainConfig
from dflash_tools.errors import ConfigError
from dflash_tools.printing import plain
from dflash_tools.report import print_report, report_compare, report_plan, report_run, report_store
from dflash_tools.report.charts import chart_spec

plans = st.builds(
    PlanSettings,
    strategy=st.sampled_from(["interleave", "weighted", "shuffle", "sequential", "packed"]),
    token_budget=st.integers(300, 2000),
    max_batch_size=st.integers(1, 20),
    batches_per_step=st.integers(1, 8),
    sort_window=st.integers(1, 4),
    num_epochs=st.integers(1, 3),
    max_steps=st.none() | st.integers(1, 6),
)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=50),
    edges=st.sets(st.integers(1, 299), max_size=4),
    supervised_share=st.floats(0, 1),
    num_validation=st.integers(0, 3),
    plan=plans,
    num_anchors=st.integers(1, 60),
    num_steps=st.none() | st.integers(0, 20),
    num_evaluations=st.integers(0, 3),
    width=st.integers(40, 160),
)
def test_every_report_of_any_run_can_be_made(
    tmp_path, lengths, edges, supervised_share, num_validation, plan, num_anchors, num_steps, num_evaluations, width
):
    store = make_index_store(
        tmp_path / "store",
        lengths,
        edges=[*sorted(edges), 300],
        supervised_share=supervised_share,
        num_validation=num_validation,
    )
    config = TrainConfig(plan=plan, loss=LossSection(num_anchors=num_anchors))
    if num_validation >= len(lengths):
        with pytest.raises(ConfigError):
            report_plan(config, [store])
        return
    held_out = np.linspace(5, 3, num_evaluations).tolist()
    run = make_run(tmp_path / "run", store, config, num_steps=num_steps, held_out=held_out)
    reports = (
        report_store(store),
        report_plan(config, [store]),
        report_run(run),
        report_compare([run, run / "plan.parquet"]),
    )
    for report in reports:
        json.dumps(plain(report.to_dict()), allow_nan=False)
        print_report(report, Console(file=io.StringIO(), width=width))
        for chart in report.charts:
            json.dumps(chart_spec(chart), allow_nan=False)
