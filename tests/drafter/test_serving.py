import json
import shlex
from pathlib import Path

from dflash_tools.drafter.serving import serving_commands


def test_each_engine_is_told_the_method_and_its_own_count():
    """XP-10: SGLang counts the anchor, vLLM and llama.cpp do not."""
    commands = serving_commands(Path("out/my drafter"), "example/target", 16)
    sglang, vllm = shlex.split(commands["sglang"]), shlex.split(commands["vllm"])
    assert sglang[sglang.index("--speculative-algorithm") + 1] == "DFLASH"
    assert sglang[sglang.index("--speculative-dflash-block-size") + 1] == "16"
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == "out/my drafter"
    assert json.loads(vllm[vllm.index("--speculative-config") + 1]) == {
        "method": "dflash",
        "model": "out/my drafter",
        "num_speculative_tokens": 15,
    }
    assert "--spec-type draft-dflash --spec-draft-n-max 15" in commands["llama.cpp"]
    assert "--target-model-dir example/target" in commands["llama.cpp"]


def test_the_speculators_layout_is_for_vllm():
    assert list(serving_commands(Path("out"), "example/target", 16, layout="speculators")) == ["vllm"]
