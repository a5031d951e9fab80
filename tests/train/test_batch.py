from dataclasses import replace

import torch

from dflash_tools.train.setup import make_setup, make_work
from dflash_tools.train.stores import open_samples
from dflash_tools.train.world import OneProcess


def test_memory_of_a_batch_counts_all_that_every_slot_holds(store_dir, make_config, tmp_path):
    setup = make_setup(make_config(), open_samples([store_dir]), torch.device("cpu"), OneProcess(), None, tmp_path)
    work = make_work(setup)
    request = work.request(0)
    blocks = work.reader.read(request).blocks
    per_slot = (blocks.ids_AS, blocks.labels_AS, blocks.weights_AS, blocks.slot_rows_N)
    more_anchors = replace(request, num_anchors=request.num_anchors + 1)
    extra = work.reader.num_bytes(more_anchors) - work.reader.num_bytes(request)
    assert extra == len(request.rows) * blocks.block_size * sum(tensor.element_size() for tensor in per_slot)
