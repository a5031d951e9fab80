"""Caches of other tools, made from a tiny target's own states in the layouts that those tools write.

As a program: ``python foreign_caches.py SOURCE TARGET FOLDER SHARE...`` converts a Model-Optimizer cache once for every
share, in forked children that kill themselves with SIGKILL at that share of all renames, and then once more to the end.
"""

import gzip
import importlib
import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from dflash_tools.config import TargetSection
from dflash_tools.target.capture import capture_states
from dflash_tools.target.load import load_target

LAYERS = (1, 2, 4)
SHARD_BYTES, SHARD_TOKENS = 9_000, 16
LENGTHS = (9, 31, 14, 64, 5, 22, 40, 17, 12, 50, 27, 8)


@dataclass
class Made:
    """A sample as a tool holds it. Shapes: (S,), (S,), (S, K, H), (S, H), (S, H)."""

    ids: torch.Tensor
    mask: torch.Tensor
    states: torch.Tensor
    last: torch.Tensor
    normed: torch.Tensor


def make_samples(target_dir: Path) -> list[Made]:
    """Twelve samples with states of a tiny target, in bfloat16."""
    target = load_target(TargetSection(model=str(target_dir), dtype="float32", device="cpu"))
    generator = np.random.default_rng(0)
    samples = []
    for length in LENGTHS:
        ids = torch.from_numpy(generator.integers(4, 300, length))
        mask = torch.ones(length, dtype=torch.long)
        mask[: length // 3] = 0
        states = capture_states(target, ids[None], LAYERS, last=True)[0]
        with torch.inference_mode():
            normed = target.final_norm(states[:, -1])
        bf16 = [part.to(torch.bfloat16).clone() for part in (states[:, :-1], states[:, -1], normed)]
        samples.append(Made(ids, mask, *bf16))
    return samples


def specforge_content(sample):
    return {
        "input_ids": sample.ids,
        "loss_mask": sample.mask,
        "hidden_states": sample.states.flatten(1)[None],
        "target_last_hidden_states": sample.normed[None],
    }


def modelopt_content(sample, conversation_id):
    return {
        "input_ids": sample.ids,
        "hidden_states": sample.normed,
        "aux_hidden_states": sample.states.flatten(1),
        "loss_mask": sample.mask.bool(),
        "conversation_id": conversation_id,
    }


def save_torch(path: Path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    packed = path.suffix == ".gz"
    path.write_bytes(gzip.compress(buffer.getvalue(), 1) if packed else buffer.getvalue())


def write_specforge(folder: Path, made) -> Path:
    """Sub-folders by row range, every other file packed."""
    for number, sample in enumerate(made):
        name = f"rows_{number // 5 * 5}-{number // 5 * 5 + 5}/data_{number}.ckpt" + (".gz" if number % 2 else "")
        save_torch(folder / name, specforge_content(sample))
    return folder


def write_modelopt(folder: Path, made) -> Path:
    """Two files a conversation."""
    for number, sample in enumerate(made):
        save_torch(folder / f"{number:04d}.pt", modelopt_content(sample, f"talk-{number // 2}"))
    return folder


def write_speculators(folder: Path, made) -> Path:
    """A dataset with ids and masks, and the states in a folder inside it."""
    import pyarrow as pa

    states = folder / "hidden_states"
    states.mkdir(parents=True)
    for number, sample in enumerate(made):
        both = torch.cat((sample.states, sample.last[:, None]), dim=1)
        save_file({"token_ids": sample.ids, "hidden_states": both.contiguous()}, states / f"hs_{number}.safetensors")
    half = len(made) // 2
    names = []
    for part, chosen in enumerate((made[:half], made[half:])):
        table = pa.table(
            {
                "input_ids": [sample.ids.tolist() for sample in chosen],
                "loss_mask": [sample.mask.tolist() for sample in chosen],
                "seq_len": [len(sample.ids) for sample in chosen],
            }
        )
        names.append(f"data-{part:05d}-of-00002.arrow")
        with pa.OSFile(str(folder / names[-1]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


WRITERS = {"specforge": write_specforge, "modelopt": write_modelopt, "speculators": write_speculators}


def main() -> None:
    """Make a reference store, and one more for every share; print exit codes as JSON."""
    from small_extraction import count_renames, finish, kill_at_rename

    from dflash_tools.convert import prepare
    from dflash_tools.convert.run import run_conversion
    from dflash_tools.store import layout

    layout.MIN_SHARD_BYTES, prepare.FORWARD_TOKEN_BUDGET = SHARD_BYTES, SHARD_TOKENS
    importlib.import_module("transformers.models.llama.modeling_llama")
    importlib.import_module("transformers.models.auto.modeling_auto")
    source, target, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    options = {"target": target, "target_layer_ids": LAYERS, "layer_ids_are": "zlab", "dtype": "float32", "buckets": 2}

    def start(store: Path, arm=lambda: None) -> int:
        child = os.fork()
        if child:
            return finish(child)
        code = 1
        try:
            arm()
            run_conversion(source, "modelopt", store, **options)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)

    codes = {"reference": [start(folder / "reference", lambda: count_renames(folder / "count"))]}
    num_renames = int((folder / "count").read_text())
    for share in sys.argv[4:]:
        point = 1 + int(float(share) * num_renames)
        killed = start(folder / share, lambda point=point: kill_at_rename(point))
        codes[share] = [killed, start(folder / share)]
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
