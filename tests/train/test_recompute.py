import torch

from dflash_tools.train.optimizer import trainable_parameters
from dflash_tools.train.setup import make_learner, make_setup, make_work
from dflash_tools.train.stores import open_samples
from dflash_tools.train.world import OneProcess


def gradients_and_kept_values(config, store_dir, run_dir):
    setup = make_setup(config, open_samples([store_dir]), torch.device("cpu"), OneProcess(), None, run_dir)
    learner, work = make_learner(setup), make_work(setup)
    kept = []
    batch = work.reader.read(work.request(0))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        sums = learner._forward(batch, setup.objective)
    del sums
    learner.accumulate(batch, learner.make_table(1)[0])
    gradients = {name: p.grad.clone() for name, p in trainable_parameters(learner.model).items()}
    return gradients, sum(kept), learner.model


def test_recomputed_layers_give_the_same_gradient_bits_and_names_and_keep_less(store_dir, make_config, tmp_path):
    config = make_config(drafter__num_hidden_layers=4)
    plain, kept, model = gradients_and_kept_values(config, store_dir, tmp_path)
    config = make_config(drafter__num_hidden_layers=4, hardware__recompute_layers=True)
    again, kept_less, recomputing = gradients_and_kept_values(config, store_dir, tmp_path)
    assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())
    assert list(recomputing.state_dict()) == list(model.state_dict())
    assert kept_less < 0.5 * kept
