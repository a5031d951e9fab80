"""Fixtures that several rooms share. No test needs a network or a GPU unless its marker says so."""

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tiny_models import make_tiny_target


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny-target"))
