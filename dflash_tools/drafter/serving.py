"""The exact commands that serve an export. Every one names the method: engines infer it only from paths."""

import json
import shlex
from pathlib import Path

from dflash_tools.drafter.checkpoint_file import Layout


def serving_commands(
    folder: Path, target: str, block_size: int, *, layout: Layout = "zlab", gguf_file: str | None = None
) -> dict[str, str]:
    """Build one shell command per engine.

    SGLang counts the slots of a block, the anchor included; vLLM and llama.cpp count drafted tokens, one fewer.

    Args:
        folder: The export.
        target: The target as the engine is given it; a folder or hub id.
        block_size: Slots of a block.
        layout: Layout of the export; SGLang and llama.cpp read only the z-lab layout.
        gguf_file: GGUF file of the target, if the drafter was trained on one.

    Returns:
        Engine name -> command.
    """
    drafter, served = shlex.quote(str(folder)), shlex.quote(target)
    speculative = json.dumps({"method": "dflash", "model": str(folder), "num_speculative_tokens": block_size - 1})
    vllm = f"vllm serve {served} --speculative-config {shlex.quote(speculative)}"
    if layout == "speculators":
        return {"vllm": vllm}
    target_gguf = shlex.quote(gguf_file or "TARGET.gguf")
    gguf = shlex.quote(f"{folder.name}-bf16.gguf")
    return {
        "sglang": (
            f"python -m sglang.launch_server --model-path {served} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {drafter} --speculative-dflash-block-size {block_size}"
        ),
        "vllm": vllm,
        "llama.cpp": (
            f"python convert_hf_to_gguf.py {drafter} --target-model-dir {served} --outtype bf16 --outfile {gguf} && "
            f"llama-server -m {target_gguf} -md {gguf} --spec-type draft-dflash --spec-draft-n-max {block_size - 1}"
        ),
    }
