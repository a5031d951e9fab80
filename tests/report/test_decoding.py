import json

import pytest

from dflash_tools.report.decoding import decoding_section, read_results

RESULT = {
    "acceptance_length": 2.5,
    "acceptance_interval": [2.1, 2.9],
    "acceptance_by_position": [0.7, 0.5, 0.3],
    "tokens_per_second": 30.0,
    "plain_tokens_per_second": 15.0,
    "identical": True,
    "prompts": "builtin",
    "step": 40,
    "dtype": "float32",
    "temperature": 0.0,
    "num_draft_tokens": 3,
    "gap": {"estimated_in_training": 2.8, "uniform_anchors_on_data": None, "true": 2.5, "steps": []},
}


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate" / "step-0000040-builtin.json").write_text(json.dumps(RESULT))
    return tmp_path


def test_what_evaluate_measured_is_shown_beside_the_estimate_of_training(run_dir):
    results, notes = read_results(run_dir)
    assert notes == ()
    table, positions, gap = decoding_section(results).parts
    row = table.frame.row(0, named=True)
    assert (row["low"], row["acceptance_length"], row["high"], row["estimated_in_training"]) == (2.1, 2.5, 2.9, 2.8)
    assert row["identical"] == "yes"
    assert positions.frame.get_column("share_of_cycles").to_list() == [0.7, 0.5, 0.3]
    assert gap.frame.get_column("measured").to_list() == ["estimated in training", "decoding"]


def test_a_sampled_evaluation_has_neither_gap_nor_identity(run_dir):
    sampled = {**RESULT, "temperature": 1.0, "gap": None, "identical": None, "acceptance_interval": None}
    (run_dir / "evaluate" / "step-0000041-builtin.json").write_text(json.dumps(sampled))
    table, positions, gap = decoding_section(read_results(run_dir)[0]).parts
    assert table.frame.get_column("identical").to_list() == ["yes", None]
    assert positions.frame.get_column("evaluation").n_unique() == 2
    assert gap.frame.get_column("evaluation").n_unique() == 1


def test_a_result_that_cannot_be_read_is_left_out_with_a_note(run_dir):
    (run_dir / "evaluate" / "torn.json").write_text('{"step"')
    results, notes = read_results(run_dir)
    assert len(results) == 1
    assert notes == ("evaluate/torn.json: no valid JSON, left out",)


def test_a_run_that_was_never_decoded_says_how(tmp_path):
    section = decoding_section(read_results(tmp_path)[0])
    assert section.parts == ()
    assert "dflash-tools evaluate" in section.text
