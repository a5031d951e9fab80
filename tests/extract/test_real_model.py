"""A few short texts through SmolLM2-135M-Instruct, loaded from its GGUF file."""

import json

import numpy as np
import pytest
import torch
from tiny_models import SMOLLM2

from dflash_tools.config import ExtractConfig, load_config
from dflash_tools.extract.run import run_extraction
from dflash_tools.store import open_store
from dflash_tools.store.verify import verify_store
from dflash_tools.target.load import load_target

CONFIG = """
[target]
model = "{model}"
gguf_file = "{gguf_file}"

[data]
sources = ["rows.jsonl"]
max_tokens = 128

[forward]
token_budget = 256
threads = 1
"""

ROWS = [
    {
        "messages": [
            {"role": "user", "content": "Name a colour."},
            {"role": "assistant", "content": "Blue, like the sky."},
        ]
    },
    {"text": "A dictionary maps keys to values. Keys are unique, and any hashable object can be one."},
    {"text": "Lists are mutable sequences, typically used to store collections of similar items."},
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_states_of_the_real_model_are_those_of_its_own_forward(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + "\n")
    (tmp_path / "extract.toml").write_text(CONFIG.format(**SMOLLM2))
    threads = torch.get_num_threads()
    loaded = []
    monkeypatch.setattr(
        "dflash_tools.extract.states.load_target", lambda section: loaded.append(load_target(section)) or loaded[-1]
    )
    settings = load_config(tmp_path / "extract.toml", ExtractConfig)
    summary = run_extraction(settings, tmp_path, tmp_path / "store")
    assert (summary["kept"], summary["target_layer_ids"]) == (3, [1, 8, 14, 20, 27])
    assert verify_store(tmp_path / "store", deep=True) == []
    store = open_store(tmp_path / "store")
    assert store.manifest.target.quantization == "dequantised Q4_1"
    for sample in store.read(range(3)):
        ids_BT = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        with torch.inference_mode():
            hidden = loaded[0].model(input_ids=ids_BT, output_hidden_states=True).hidden_states
        found = torch.from_numpy(sample.hidden_states).view(torch.bfloat16).float()
        for k, layer in enumerate((1, 8, 14, 20, 27)):
            expected = hidden[layer + 1][0].float()
            assert (found[:, k] - expected).norm() / expected.norm() < 0.02
    torch.set_num_threads(threads)
