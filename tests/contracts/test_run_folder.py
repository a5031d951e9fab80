import pytest

from dflash_tools.contracts.fingerprint import checksum_of_file
from dflash_tools.contracts.record import TrainState
from dflash_tools.contracts.run_folder import DRAFTER_FILE, STATE_FILE, checkpoint_dir, find_checkpoint
from dflash_tools.errors import ResumeError


def make_checkpoint(run_dir, step, best_step):
    folder = checkpoint_dir(run_dir, step)
    folder.mkdir(parents=True)
    tensors = folder / DRAFTER_FILE
    tensors.write_bytes(b"weights of step %d" % step)
    state = TrainState(
        step=step, attempt=0, plan_fingerprint="p", store_fingerprints=("s",), drafter_fingerprint="d",
        settings_fingerprint="t", threads=1, skipped_steps=0, consecutive_skipped_steps=0, best_step=best_step,
        best_loss=1.0, versions={}, files={DRAFTER_FILE: (tensors.stat().st_size, checksum_of_file(tensors))},
    )  # fmt: skip
    (folder / STATE_FILE).write_text(state.model_dump_json())
    return folder


def test_best_latest_and_a_number_name_a_checkpoint(tmp_path):
    """RC-16: by number, not by name."""
    for step in (900, 9000, 10000):
        make_checkpoint(tmp_path, step, best_step=900)
    assert find_checkpoint(tmp_path, "latest")[1].step == 10000
    assert find_checkpoint(tmp_path, "best")[1].step == 900
    assert find_checkpoint(tmp_path, "9000")[1].step == 9000
    with pytest.raises(ResumeError, match="there are 900, 9000, 10000"):
        find_checkpoint(tmp_path, "8000")


def test_a_damaged_latest_checkpoint_is_said_and_never_replaced_in_silence(tmp_path):
    """RC-01."""
    make_checkpoint(tmp_path, 10, best_step=10)
    damaged = make_checkpoint(tmp_path, 20, best_step=10) / DRAFTER_FILE
    damaged.write_bytes(b"WEIGHTS of step 20")
    with pytest.raises(ResumeError, match=r"not whole .*give --checkpoint 10"):
        find_checkpoint(tmp_path, "latest")
    assert find_checkpoint(tmp_path, "10")[1].step == 10
    assert find_checkpoint(tmp_path, "best")[1].step == 10


def test_a_run_without_held_out_samples_is_told_to_take_the_latest(tmp_path):
    make_checkpoint(tmp_path, 10, best_step=None)
    with pytest.raises(ResumeError, match="use --checkpoint latest"):
        find_checkpoint(tmp_path, "best")
