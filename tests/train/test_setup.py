import pytest
import torch

from dflash_tools.contracts.run_folder import find_checkpoint, read_card
from dflash_tools.drafter.config import DrafterConfig
from dflash_tools.drafter.export import Provenance, export_drafter
from dflash_tools.errors import ConfigError, ResumeError
from dflash_tools.train.checkpoint import load_checkpoint
from dflash_tools.train.run import run_training
from dflash_tools.train.run_log import read_evaluations
from dflash_tools.train.setup import make_learner, make_setup
from dflash_tools.train.stores import open_samples
from dflash_tools.train.world import OneProcess


def export(run_dir, folder, layout="zlab"):
    card = read_card(run_dir)
    provenance = Provenance(
        target=card.target, tokenizer=card.tokenizer, data=card.data, store_fingerprints=(),
        hidden_states_dtype=card.hidden_states_dtype, step=6,
    )  # fmt: skip
    weights, _ = load_checkpoint(find_checkpoint(run_dir, "latest")[0])
    export_drafter(DrafterConfig.from_dict(card.drafter), weights, provenance, folder, layout=layout)
    return weights


def weights_at_start(config, store_dir, config_dir):
    setup = make_setup(
        config, open_samples([store_dir]), torch.device("cpu"), OneProcess(), None, config_dir / "run", config_dir
    )
    return make_learner(setup).model.state_dict()


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_a_run_starts_from_an_exported_drafter_of_either_layout(layout, store_dir, make_config, straight_run, tmp_path):
    """The file has bfloat16; blocks may have another size."""
    weights = export(straight_run, tmp_path / "drafter", layout)
    config = make_config(drafter__init_from="drafter", drafter__block_size=6)
    for name, tensor in weights_at_start(config, store_dir, tmp_path).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, weights[name].bfloat16().float())


def test_a_run_from_a_trained_drafter_begins_where_that_one_ended(store_dir, make_config, straight_run, tmp_path):
    export(straight_run, tmp_path / "drafter")
    config = make_config(drafter__init_from=str(tmp_path / "drafter"), plan__max_steps=1)
    run_training(config, [store_dir], tmp_path / "run")
    before, after = read_evaluations(straight_run)[6].loss, read_evaluations(tmp_path / "run")[0].loss
    assert after == pytest.approx(before, rel=1e-2)


def test_a_drafter_of_another_shape_is_refused_by_name_before_anything_is_written(
    store_dir, make_config, straight_run, tmp_path
):
    export(straight_run, tmp_path / "drafter")
    config = make_config(drafter__init_from="drafter", drafter__num_hidden_layers=2, drafter__intermediate_size=48)
    with pytest.raises(ConfigError) as refusal:
        run_training(config, [store_dir], tmp_path / "run", config_dir=tmp_path)
    assert "num_hidden_layers 1 there, 2 here" in str(refusal.value)
    assert "intermediate_size 64 there, 48 here" in str(refusal.value)
    assert "block_size" not in str(refusal.value)
    with pytest.raises(ConfigError, match="nowhere: not found"):
        run_training(make_config(drafter__init_from="nowhere"), [store_dir], tmp_path / "run", config_dir=tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_resume_needs_the_first_drafter_no_more_and_refuses_another(store_dir, make_config, straight_run, tmp_path):
    export(straight_run, tmp_path / "drafter")
    first = make_config(drafter__init_from="drafter", plan__max_steps=2)
    run_training(first, [store_dir], tmp_path / "run", config_dir=tmp_path)
    (tmp_path / "drafter").rename(tmp_path / "moved")
    more = make_config(drafter__init_from="drafter", plan__max_steps=3)
    assert run_training(more, [store_dir], tmp_path / "run", resume=True)["steps"] == 3
    with pytest.raises(ResumeError, match=r"drafter\.init_from = drafter there, None now"):
        run_training(make_config(plan__max_steps=3), [store_dir], tmp_path / "run", resume=True)
