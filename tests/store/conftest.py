import os

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk():
    """A power cut cannot be tested here, so small files need not wait for the disk."""
    real = os.fsync
    os.fsync = lambda descriptor: None
    yield
    os.fsync = real
