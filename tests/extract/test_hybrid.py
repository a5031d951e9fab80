"""A target with linear attention, through the whole extraction."""

import numpy as np
import torch
from small_extraction import write_config
from tiny_architectures import make_architecture
from tiny_models import make_tiny_tokenizer

from dflash_tools.config import ExtractConfig, TargetSection, load_config
from dflash_tools.extract.run import run_extraction
from dflash_tools.store import open_store
from dflash_tools.target.capture import capture_states
from dflash_tools.target.load import load_target


def test_padding_does_not_reach_the_states_and_slow_layers_are_said_before_the_start(tmp_path, capsys):
    """EX-07."""
    folder = make_architecture("qwen3_next", tmp_path / "target")
    make_tiny_tokenizer(folder)
    threads = torch.get_num_threads()
    config = write_config(tmp_path, folder, num_rows=8, broken=False)
    run_extraction(load_config(config, ExtractConfig), tmp_path, tmp_path / "store")
    torch.set_num_threads(threads)
    assert "linear-attention layers run on slow reference code" in capsys.readouterr().err
    target = load_target(TargetSection(model=str(folder), dtype="float32", device="cpu"))
    store = open_store(tmp_path / "store")
    for sample in store.read(range(len(store))):
        ids_BT = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        expected = capture_states(target, ids_BT, (1, 2, 3))[0]
        found = torch.from_numpy(sample.hidden_states).view(torch.bfloat16).float()
        torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-3)
