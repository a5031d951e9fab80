"""A small store, and a healthy run on it, that the tests of reports share."""

from pathlib import Path

import pytest
from report.made import log_normal_lengths, make_index_store, make_run

from dflash_tools.config import PlanSettings, TrainConfig


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Path:
    return make_index_store(
        tmp_path_factory.mktemp("store") / "store", log_normal_lengths(1500), dropped={"empty": 3, "too_short": 1}
    )


@pytest.fixture(scope="session")
def config() -> TrainConfig:
    return TrainConfig(plan=PlanSettings(num_epochs=2, batches_per_step=2))


@pytest.fixture(scope="session")
def run(tmp_path_factory, store, config) -> Path:
    return make_run(tmp_path_factory.mktemp("run") / "run", store, config)
