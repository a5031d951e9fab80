import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_tools.drafter.released import load_drafter
from dflash_tools.errors import ConfigError, ResumeError
from dflash_tools.evaluate.check_run import check_checkpoint
from dflash_tools.evaluate.export_run import export_run
from dflash_tools.evaluate.run import run_evaluation


@pytest.fixture(scope="module")
def held_out(run_dir):
    return run_evaluation(run_dir, dtype="float32", max_new_tokens=12)


def test_the_result_has_the_promised_keys_and_consistent_figures(held_out):
    assert held_out["identical"] is True
    assert held_out["num_different"] == 0
    assert held_out["first_divergence"] is None
    assert math.isclose(held_out["acceptance_length"], 1 + held_out["accepted_draft_tokens"], abs_tol=0.01)
    assert math.isclose(sum(held_out["acceptance_by_position"]), held_out["accepted_draft_tokens"], abs_tol=0.01)
    assert len(held_out["acceptance_by_position"]) == held_out["num_draft_tokens"] == 5
    assert sum(held_out["acceptance_histogram"]) == held_out["num_cycles"]
    assert held_out["tokens_per_second"] > 0
    assert held_out["plain_tokens_per_second"] > 0
    assert (held_out["step"], held_out["target_cache"]) == (7, "cropped")


def test_held_out_samples_of_the_runs_store_are_the_default_prompts(held_out, store_dir):
    assert held_out["prompts"] == f"held-out samples of {store_dir}"
    assert held_out["num_prompts"] == len(held_out["by_prompt"]) == 3
    assert {row["kind"] for row in held_out["by_kind"]} == {"held-out"}


def test_the_gap_is_shown_from_training_to_decoding(held_out):
    gap = held_out["gap"]
    assert gap["estimated_in_training"] == 1.01
    assert gap["true"] == held_out["acceptance_length"]
    assert all(gap[key] >= 1.0 for key in ("uniform_anchors_on_data", "decode_anchors_on_data"))
    assert held_out["gap_steps"][0]["before"] == 1.01
    assert len(held_out["gap_steps"]) == 4


def test_the_result_is_kept_in_the_run_folder(held_out, run_dir):
    path = run_dir / "evaluate" / "step-0000007-held-out-float32-t0-k5-b1.json"
    assert held_out["results"] == str(path)
    kept = json.loads(path.read_text())
    assert kept["acceptance_length"] == held_out["acceptance_length"]
    assert kept["warnings"] == held_out["warnings"]


def test_fewer_drafted_tokens_bfloat16_and_sampling_run(run_dir):
    result = run_evaluation(
        run_dir,
        dtype="bfloat16",
        max_new_tokens=8,
        num_draft_tokens=2,
        temperature=0.8,
        prompts="builtin",
        max_prompts=3,
    )
    assert result["identical"] is None
    assert result["gap"] is None
    assert len(result["acceptance_by_position"]) == 2
    assert [row["kind"] for row in result["by_kind"]] == ["math", "code", "chat"]


def test_batches_of_prompts_give_the_same_answers(run_dir, held_out):
    together = run_evaluation(run_dir, dtype="float32", max_new_tokens=12, batch_size=2)
    assert together["identical"]
    for figure in ("acceptance_length", "acceptance_histogram", "num_new_tokens", "gap"):
        assert together[figure] == held_out[figure]
    assert [row["prompt"] for row in together["by_prompt"]] == [row["prompt"] for row in held_out["by_prompt"]]


def test_prompts_come_from_a_file_and_too_long_ones_are_named(run_dir, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "the quick fox"}], "kind": "short"},
        {"prompt": "the lazy dog " * 2000, "kind": "long"},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    result = run_evaluation(run_dir, dtype="float32", max_new_tokens=4, prompts=path)
    assert result["num_prompts"] == 1
    assert result["skipped"] == ["mine.jsonl:2"]
    assert result["by_kind"][0]["kind"] == "short"


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_an_export_decodes_as_the_run_does(run_dir, held_out, tmp_path, layout, tiny_target_dir):
    summary = export_run(run_dir, tmp_path / "out", layout=layout)
    assert load_drafter(tmp_path / "out", num_target_layers=6)[0].block_size == summary["block_size"] == 6
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "the quick brown fox jumps"}))
    exported = run_evaluation(tmp_path / "out", dtype="float32", max_new_tokens=12, prompts=prompts)
    again = run_evaluation(run_dir, dtype="float32", max_new_tokens=12, prompts=prompts)
    assert exported["identical"]
    assert exported["by_prompt"][0]["num_new_tokens"] == again["by_prompt"][0]["num_new_tokens"]
    assert exported["target"] == str(tiny_target_dir)
    assert exported["warnings"] == []
    assert not (tmp_path / "out" / "evaluate").exists()


def test_a_copy_of_the_embedding_that_is_not_the_targets_is_named(run_dir, tmp_path, target):
    export_run(run_dir, tmp_path / "out", layout="speculators")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    copies = {
        "embed_tokens.weight": target.embedding.weight.to(torch.bfloat16),
        "lm_head.weight": torch.zeros_like(target.head.weight, dtype=torch.bfloat16),
    }
    save_file(tensors | copies, tmp_path / "out" / "model.safetensors")
    result = run_evaluation(tmp_path / "out", dtype="float32", max_new_tokens=2, prompts="builtin", max_prompts=1)
    assert [warning.split(" ")[0] for warning in result["warnings"]] == ["lm_head.weight"]


def test_the_card_names_target_data_template_and_measurement(run_dir, held_out, tmp_path, target):
    """XP-17 and XP-19: a clean folder with config, weights and a card."""
    summary = export_run(run_dir, tmp_path / "out", checkpoint="latest")
    card = (tmp_path / "out" / "README.md").read_text()
    assert target.identity.model in card
    assert f"Acceptance length {held_out['acceptance_length']:.2f}" in card
    assert all(summary[f"serve_{engine}"] in card for engine in ("sglang", "vllm", "llama_cpp"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    with pytest.raises(ConfigError, match="not empty"):
        export_run(run_dir, tmp_path / "out")


def test_a_push_uploads_the_folder_and_a_refusal_is_a_sentence(run_dir, tmp_path, monkeypatch):
    import huggingface_hub

    uploads = []

    class Api:
        def create_repo(self, repo_id, *, private, exist_ok):
            if repo_id == "nobody/refused":
                raise OSError("401 Unauthorized")
            assert private

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            uploads.append((repo_id, sorted(path.name for path in folder_path.iterdir())))
            return type("Commit", (), {"commit_url": "https://hub/commit/1"})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    summary = export_run(run_dir, tmp_path / "out", push_to="me/drafter")
    assert summary["pushed"] == "https://hub/commit/1"
    assert uploads == [("me/drafter", ["README.md", "config.json", "model.safetensors"])]
    with pytest.raises(ConfigError, match=r"401 Unauthorized; the export lies in"):
        export_run(run_dir, tmp_path / "again", push_to="nobody/refused")
    assert (tmp_path / "again" / "config.json").exists()


def test_check_pairs_an_export_with_its_target_without_loading_weights(run_dir, tmp_path, tiny_target_dir):
    export_run(run_dir, tmp_path / "out")
    findings = check_checkpoint(tmp_path / "out", str(tiny_target_dir))
    assert [str(one) for one in findings if not one.ok or one.warning] == []


def test_what_does_not_fit_is_a_sentence(run_dir, tmp_path):
    with pytest.raises(ConfigError, match="drafts 1 to 5 tokens"):
        run_evaluation(run_dir, num_draft_tokens=6)
    with pytest.raises(ConfigError, match="neither a run"):
        run_evaluation(tmp_path)
    with pytest.raises(ConfigError, match="--dtype int8"):
        run_evaluation(run_dir, dtype="int8")
    with pytest.raises(ResumeError, match="no checkpoint of step 9"):
        run_evaluation(run_dir, checkpoint="9")
    with pytest.raises(ConfigError, match="--format gguf"):
        export_run(run_dir, tmp_path / "out", layout="gguf")
