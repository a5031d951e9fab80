import json
import re
import warnings
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_tools.contracts.record import BatchRecord, BucketEvaluation, EvaluationRecord, StepRecord
from dflash_tools.train import curves as curves_module
from dflash_tools.train.curves import Curves
from dflash_tools.train.progress import TrainProgress
from dflash_tools.train.run_log import RunLog, read_evaluations, read_steps
from dflash_tools.train.summary import summarise_run


def make_step(step, attempt=0, loss=1.0):
    return StepRecord(
        step=step, attempt=attempt, epoch=0, loss=loss, label_weight=1.0, accuracy_by_slot=(0.5,), count_by_slot=(2,),
        acceptance_length=1.5, grad_norm=1.0, learning_rate=1e-3, skipped=False, batches=(), num_tokens=10,
        num_padded_tokens=12, num_supervised_tokens=8, num_anchors=3, padding_efficiency=10 / 12,
        tokens_per_second=5.0, data_wait_seconds=0.0, compute_seconds=1.0, checkpoint_seconds=0.0, finished_at=0.0,
    )  # fmt: skip


def make_evaluation(step, attempt=0, loss=2.0):
    return EvaluationRecord(
        step=step, attempt=attempt, num_samples=1, loss=loss, accuracy_by_slot=(0.25,), count_by_slot=(4,),
        acceptance_length=1.25, num_blocks=4, num_truncated_blocks=0,
        by_bucket=(BucketEvaluation(bucket_id=0, num_samples=1, num_blocks=4, loss=loss, acceptance_length=1.25),),
        seconds=0.1, finished_at=0.0,
    )  # fmt: skip


def test_without_a_whole_block_no_acceptance_length_is_shown_or_drawn(tmp_path):
    bucket = BucketEvaluation(bucket_id=0, num_samples=1, num_blocks=0, loss=2.0, acceptance_length=1.0)
    none = {"acceptance_length": 1.0, "num_blocks": 0, "num_truncated_blocks": 7, "by_bucket": (bucket,)}
    record = make_evaluation(0).model_copy(update=none)
    log = RunLog(tmp_path)
    log.write_evaluation(record)
    log.write_evaluation(make_evaluation(2))
    log.close()
    summary = summarise_run(tmp_path, SimpleNamespace(step=2, skipped_steps=0, best_step=None), num_parameters=1)
    assert (summary["acceptance_length_before"], summary["acceptance_length_after"]) == (None, 1.25)
    said = []
    TrainProgress.show_evaluation(SimpleNamespace(say=said.append), record)
    assert "acceptance length not estimated: all 7 blocks are truncated" in said[0]
    drawn = {}
    curves = SimpleNamespace(_writer=SimpleNamespace(add_scalar=lambda tag, value, at: drawn.update({tag: value})))
    Curves.write_evaluation(curves, record)
    assert drawn == {"held_out/loss": 2.0, "held_out/accuracy_slot_1": 0.25, "held_out/loss_bucket_0": 2.0}


def test_lines_are_appended_and_the_newest_attempt_counts(tmp_path):
    log = RunLog(tmp_path)
    for step in (0, 1, 2):
        log.write_step(make_step(step))
    log.write_evaluation(make_evaluation(2))
    log.close()
    before = (tmp_path / "log.jsonl").read_bytes()
    log = RunLog(tmp_path)
    log.write_step(make_step(1, attempt=1, loss=9.0))
    log.write_evaluation(make_evaluation(2, attempt=1, loss=8.0))
    log.close()
    assert (tmp_path / "log.jsonl").read_bytes().startswith(before)
    assert [record["loss"] for record in read_steps(tmp_path).values()] == [1.0, 9.0, 1.0]
    assert read_evaluations(tmp_path)[2].loss == 8.0


def test_half_a_line_of_a_killed_process_is_cut_off_before_the_next_is_written(tmp_path):
    """LG-07."""
    log = RunLog(tmp_path)
    log.write_step(make_step(0))
    log.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 1, "att')
    assert list(read_steps(tmp_path)) == [0]
    log = RunLog(tmp_path)
    log.write_step(make_step(1))
    log.close()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]


def read_events(run_dir):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def read_curves(run_dir):
    return {tag: [event.step for event in events] for tag, events in read_events(run_dir).items()}


def test_curves_do_not_fold_back_after_a_restart(tmp_path):
    """LG-01, LG-02: one value per step and tag over three attempts."""
    for attempt, (first, last) in enumerate([(0, 15), (10, 18), (18, 20)]):
        with Curves(tmp_path, from_step=first, num_steps=20) as curves:
            for step in range(first, last):
                curves.write_step(make_step(step, attempt))
                if (step + 1) % 5 == 0:
                    curves.write_evaluation(make_evaluation(step + 1, attempt))
            curves.flush()
    found = read_curves(tmp_path)
    assert found["train/loss"] == list(range(1, 21))
    assert found["held_out/loss"] == [5, 10, 15, 20]
    assert found["held_out/accuracy_slot_1"] == [5, 10, 15, 20]


def test_every_curve_of_the_prepared_layout_exists_and_losses_are_pooled_by_bucket(tmp_path):
    batches = tuple(
        BatchRecord(
            batch=i, bucket_id=bucket_id, rank=0, batch_size=1, min_tokens=5, mean_tokens=5.0, max_tokens=5,
            num_tokens=5, num_padded_tokens=5, num_supervised_tokens=4, num_anchors=2, num_slots=6,
            num_truncated_blocks=0, label_weight=weight, loss=loss, acceptance_length=1.0,
        )
        for i, (bucket_id, weight, loss) in enumerate([(0, 1.0, 4.0), (1, 2.0, 3.0), (0, 3.0, 2.0), (2, 0.0, 0.0)])
    )  # fmt: skip
    with Curves(tmp_path, from_step=0, num_steps=1) as curves:
        curves.write_step(make_step(0).model_copy(update={"batches": batches}))
        curves.write_evaluation(make_evaluation(1))
    values = read_events(tmp_path)
    patterns = [pattern for charts in curves_module._LAYOUT.values() for _, tags in charts.values() for pattern in tags]
    assert all(any(re.fullmatch(pattern, tag) for tag in values) for pattern in patterns)
    assert values["train/loss_bucket_0"][0].value == 2.5
    assert values["composition/tokens_bucket_0"][0].value == 10
    assert "train/loss_bucket_2" not in values


def test_event_files_are_bounded_whatever_the_number_of_steps(tmp_path):
    """LG-04: a long run draws every k-th step, and the last."""
    num_steps = 1_000_000
    with Curves(tmp_path, from_step=0, num_steps=num_steps) as curves:
        curves.write_settings(
            {"plan.strategy": "interleave", "optimizer.learning_rate": 1e-3, "drafter.layer_types": None}
        )
        for step in range(0, 2000):
            curves.write_step(make_step(step))
        curves.write_step(make_step(num_steps - 1))
    size = sum(path.stat().st_size for path in (tmp_path / "tensorboard").rglob("*") if path.is_file())
    assert read_curves(tmp_path)["train/loss"] == [*range(200, 2001, 200), num_steps]
    assert size / 2000 < 200


@pytest.mark.parametrize("field", ["step", "attempt", "epoch", "loss", "grad_norm", "learning_rate", "batches"])
def test_a_line_of_the_log_has_the_promised_keys(tmp_path, field):
    log = RunLog(tmp_path)
    log.write_step(make_step(0))
    log.close()
    assert field in json.loads((tmp_path / "log.jsonl").read_text())
