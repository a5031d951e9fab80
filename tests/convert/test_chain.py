"""Kills in processes of their own, and training on what came out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from foreign_caches import WRITERS, write_modelopt

from dflash_tools.config import TrainConfig
from dflash_tools.store.verify import verify_store
from dflash_tools.train.run import run_training


@pytest.mark.slow
def test_killed_conversions_end_in_the_same_bytes(tmp_path, made, tiny_target_dir):
    """ST-04: SIGKILL just before a rename, with a torn temp file left behind."""
    source = write_modelopt(tmp_path / "cache", made)
    stores = tmp_path / "stores"
    stores.mkdir()
    shares = ["0.05", "0.15", "0.3", "0.5", "0.7", "0.9", "0.99"]
    program = Path(__file__).parent.parent / "foreign_caches.py"
    done = subprocess.run(
        [sys.executable, str(program), str(source), str(tiny_target_dir), str(stores), *shares],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    codes = json.loads(done.stdout.splitlines()[-1])
    assert codes == {"reference": [0], **{share: [-9, 0] for share in shares}}
    expected = contents(stores / "reference")
    for share in shares:
        assert contents(stores / share) == expected, share


@pytest.mark.slow
@pytest.mark.parametrize("tool", WRITERS)
def test_a_drafter_trains_on_a_converted_store(tool, tmp_path, made, convert):
    source = WRITERS[tool](tmp_path / "cache", made)
    convert(source, tool, tmp_path / "store", keep_last_hidden_state=True, validation_fraction=0.2)
    assert verify_store(tmp_path / "store", deep=True) == []
    config = TrainConfig.model_validate(
        {
            "drafter": {"num_hidden_layers": 1, "block_size": 4},
            "plan": {"token_budget": 128, "max_batch_size": 4, "batches_per_step": 2, "max_steps": 2},
            "loss": {"num_anchors": 8, "type": "kd"},
            "hardware": {"device": "cpu", "threads": 1},
        }
    )
    run_training(config, [tmp_path / "store"], tmp_path / "run")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)


def contents(store):
    """Every file of a store by name."""
    return {path.relative_to(store).as_posix(): path.read_bytes() for path in store.rglob("*") if path.is_file()}
