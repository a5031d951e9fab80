from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_tools.errors import UserError
from dflash_tools.train.work import probe_largest_batch

REQUEST = SimpleNamespace(rows=np.arange(2), num_tokens=np.array([5, 7]), num_anchors=np.array([3, 4]))
WORK = SimpleNamespace(
    costs=np.array([1.0, 9.0]), request=lambda batch: REQUEST, reader=SimpleNamespace(read=lambda request: request)
)


def failing_learner(error):
    def probe(batch):
        raise error

    return SimpleNamespace(probe=probe)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: can't allocate memory: tried 9 bytes"),
    ],
)
def test_too_little_memory_for_the_largest_batch_is_said_with_its_size(error):
    with pytest.raises(UserError, match=r"largest batch of the plan \(batch 1: 2 samples, 12 tokens, 7 blocks\)"):
        probe_largest_batch(failing_learner(error), WORK)


def test_any_other_error_of_the_largest_batch_stays_what_it_is():
    with pytest.raises(RuntimeError, match="shapes differ"):
        probe_largest_batch(failing_learner(RuntimeError("shapes differ")), WORK)
