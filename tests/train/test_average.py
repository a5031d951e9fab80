import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dflash_tools.contracts.run_folder import find_checkpoint
from dflash_tools.train.average import AveragedWeights
from dflash_tools.train.evaluation import make_evaluation_record
from dflash_tools.train.run import run_training
from dflash_tools.train.run_log import read_evaluations
from dflash_tools.train.setup import make_learner, make_setup, make_work
from dflash_tools.train.stores import open_samples
from dflash_tools.train.world import OneProcess


def test_the_average_follows_quickly_at_first_and_with_its_decay_later():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    averages = AveragedWeights(model, 0.5)
    with torch.no_grad():
        model.weight.fill_(1.0)
    found = []
    for num_updates in (1, 2, 20):
        averages.follow(num_updates)
        found.append(float(averages.tensors()["weight"]))
    left = [2 / 11, 2 / 11 * 3 / 12, 2 / 11 * 3 / 12 * 0.5]
    assert found == pytest.approx([1 - share for share in left])


def test_the_model_computes_with_the_average_for_a_while_and_keeps_its_masters_even_after_an_error():
    model = nn.Linear(2, 2, bias=False)
    averages = AveragedWeights(model, 0.9)
    with torch.no_grad():
        model.weight.add_(1.0)
    master, place = model.weight.detach().clone(), model.weight.data_ptr()
    seen = []

    def measure_and_fail():
        with averages.in_model():
            seen.append(model.weight.detach().clone())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        measure_and_fail()
    assert torch.equal(seen[0], averages.tensors()["weight"])
    assert torch.equal(model.weight, master)
    assert model.weight.data_ptr() == place


def test_masters_train_as_without_an_average_and_the_average_is_what_is_saved_and_measured(
    store_dir, make_config, straight_run, end_state, tmp_path
):
    config, run_dir = make_config(optimizer__ema_decay=0.5), tmp_path / "run"
    run_training(config, [store_dir], run_dir)
    plain = end_state(straight_run)["tensors"]
    found = end_state(run_dir)["tensors"]
    for name, tensor in plain.items():
        key = name.replace("drafter/", "optimizer/master.") if name.startswith("drafter/") else name
        assert found[key] == tensor
    assert found["drafter/fc.weight"] != plain["drafter/fc.weight"]
    # Measured: a fresh process that has the drafter file alone gets the same held-out loss.
    folder, state = find_checkpoint(run_dir, "latest")
    setup = make_setup(config, open_samples([store_dir]), torch.device("cpu"), OneProcess(), None, run_dir)
    learner, work = make_learner(setup), make_work(setup)
    learner.model.load_state_dict(load_file(folder / "drafter.safetensors"))
    requests = work.held_out
    table = torch.stack([learner.make_table(1)[0] for _ in requests])
    for request in requests:
        learner.measure(work.reader.read(request), table[request.batch])
    record = make_evaluation_record(requests, table, step=state.step, attempt=0, seconds=0.0)
    assert record.loss == read_evaluations(run_dir)[state.step].loss
