"""The whole chain through the command line, as a user runs it, on a tiny random target."""

import json
import subprocess
import sys

import polars as pl
import pytest

EXTRACT = """
[target]
model = "{target}"
dtype = "float32"
device = "cpu"
num_target_features = 3

[data]
sources = ["chats.jsonl"]
max_tokens = 256
validation_fraction = 0.25
min_validation_samples = 3

[buckets]
count = 3

[forward]
token_budget = 512
threads = 1
"""

TRAIN = """
[drafter]
num_hidden_layers = 1
block_size = 4

[plan]
token_budget = 512
max_batch_size = 4
batches_per_step = 2
num_epochs = 2

[loss]
num_anchors = 8

[checkpoint]
save_steps = 3

[evaluation]
eval_steps = 3
num_anchors = 8

[hardware]
device = "cpu"
threads = 1
"""


def run_cli(*arguments, folder):
    result = subprocess.run(
        [sys.executable, "-m", "dflash_tools", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def chain(tmp_path_factory, tiny_target_dir):
    """Run every command once; returns the folder and each command's JSON object."""
    folder = tmp_path_factory.mktemp("chain")
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "a", "cat", "sat", "down"]
    rows = [
        {
            "messages": [
                {"role": "user", "content": " ".join(words[: 2 + number % 9])},
                {"role": "assistant", "content": " ".join(words * (1 + number % 5)) + str(number)},
            ]
        }
        for number in range(24)
    ]
    lines = [json.dumps(row) for row in rows] + ["{broken", json.dumps({"messages": []})]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "extract.toml").write_text(EXTRACT.format(target=tiny_target_dir))
    (folder / "train.toml").write_text(TRAIN)
    answers = {
        "dry run": run_cli("extract", "extract.toml", "--store", "store", "--dry-run", folder=folder),
        "extract": run_cli("extract", "extract.toml", "--store", "store", folder=folder),
        "extract again": run_cli("extract", "extract.toml", "--store", "store", folder=folder),
        "verify": run_cli("verify", "store", "--deep", folder=folder),
        "report store": run_cli("report", "store", "store", "--out", "reports/store", folder=folder),
        "report plan": run_cli("report", "plan", "train.toml", "--store", "store", folder=folder),
        "train": run_cli("train", "train.toml", "--store", "store", "--run", "run", folder=folder),
        "report run": run_cli("report", "run", "run", "--out", "reports/run", folder=folder),
        "evaluate": run_cli("evaluate", "run", "--dtype", "float32", "--max-new-tokens", 16, folder=folder),
        "export": run_cli("export", "run", "--out", "export", folder=folder),
        "check": run_cli("check", "export", folder=folder),
        "evaluate export": run_cli("evaluate", "export", "--dtype", "float32", "--max-new-tokens", 16, folder=folder),
    }
    return folder, answers


def test_every_input_row_is_a_sample_or_is_told_as_dropped(chain):
    folder, answers = chain
    for name in ("dry run", "extract"):
        summary = answers[name]
        assert summary["read"] == 26
        assert summary["kept"] + summary["dropped"] + summary["merged"] == summary["read"]
        assert summary["kept"] == summary["num_samples"] == 24
        assert sum(summary["dropped_by_reason"].values()) == summary["dropped"] == 2
    assert pl.read_parquet(folder / "store" / "dropped.parquet").height == 2


def test_the_dry_run_counts_what_is_then_written(chain):
    _, answers = chain
    assert answers["dry run"]["num_tokens"] == answers["extract"]["num_tokens"]
    assert answers["dry run"]["num_bytes"] == pytest.approx(answers["extract"]["num_bytes"], rel=0.02)


def test_extracting_a_finished_store_again_does_nothing(chain):
    _, answers = chain
    assert answers["extract again"]["num_samples"] == answers["extract"]["num_samples"]


def test_the_store_verifies(chain):
    assert chain[1]["verify"] == {"ok": True, "damage": []}


def test_the_plan_has_the_fewest_equal_neighbours(chain):
    plan = chain[1]["report plan"]
    assert plan["equal_neighbours"] == plan["equal_neighbours_minimum"]
    assert 0 < plan["padding_efficiency"] <= 1
    assert isinstance(plan["diagnosis"], list)
    assert plan["buckets"]


def test_the_log_has_a_line_per_step_and_each_batch_its_bucket(chain):
    folder, _ = chain
    records = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(len(records)))
    index = pl.read_parquet(folder / "store" / "index.parquet")
    trained = sum(batch["batch_size"] for record in records for batch in record["batches"])
    assert trained == 2 * index.filter(split="train").height
    assert {batch["bucket_id"] for record in records for batch in record["batches"]} <= set(index["bucket_id"])
    assert {"attempt", "epoch", "loss", "grad_norm", "learning_rate"} <= set(records[0])


def test_decoding_with_the_drafter_equals_plain_decoding(chain):
    for name in ("evaluate", "evaluate export"):
        answer = chain[1][name]
        assert answer["identical"] is True
        assert 1 <= answer["acceptance_length"] <= 4
        assert len(answer["acceptance_by_position"]) == 3


def test_the_export_passes_every_check(chain):
    assert chain[1]["check"]["ok"] is True
    assert len(chain[1]["check"]["findings"]) > 10


def test_reports_are_written(chain):
    folder, _ = chain
    for name in ("store", "run"):
        assert (folder / "reports" / name / "report.html").read_text().startswith("<!")
        assert (folder / "reports" / name / "report.md").stat().st_size > 200
