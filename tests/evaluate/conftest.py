import json
from dataclasses import replace

import pytest
from make_store import make_store
from safetensors.torch import save_file

from dflash_tools.config import TargetSection
from dflash_tools.contracts.fingerprint import checksum_of_file
from dflash_tools.contracts.record import EvaluationRecord, TrainState
from dflash_tools.contracts.run_folder import (
    Attempt,
    RunCard,
    StoreReference,
    checkpoint_dir,
)
from dflash_tools.data import load_tokenizer, tokenizer_identity
from dflash_tools.drafter.config import DrafterConfig
from dflash_tools.drafter.model import DFlashDrafter
from dflash_tools.store import open_store
from dflash_tools.target.load import load_target


@pytest.fixture(scope="session")
def target(tiny_target_dir):
    return load_target(TargetSection(model=str(tiny_target_dir), dtype="float32", device="cpu"))


def drafter_for(target, *, seed=0, **changes):
    identity = target.identity
    config = DrafterConfig(
        hidden_size=identity.hidden_size,
        vocab_size=identity.vocab_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=4096,
        initializer_range=0.2,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=16,
        block_size=6,
        mask_token_id=3,
        target_layer_ids=(1, 3),
        num_target_layers=identity.num_hidden_layers,
    )
    model = DFlashDrafter(replace(config, **changes))
    model.init_weights(seed)
    return model


@pytest.fixture(scope="session")
def make_drafter(target):
    return lambda **changes: drafter_for(target, **changes)


@pytest.fixture(scope="session")
def store_dir(tmp_path_factory, target):
    path = tmp_path_factory.mktemp("store") / "store"
    return make_store(path, vocab_size=target.identity.vocab_size, validation_rows=(1, 5, 8), hidden_size=32)


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory, tiny_target_dir, target, store_dir):
    """A run folder with one checkpoint of random weights, as train writes it, made by hand."""
    run = tmp_path_factory.mktemp("run") / "run"
    drafter = drafter_for(target)
    manifest = open_store(store_dir).manifest
    tokenizer = load_tokenizer(str(tiny_target_dir))
    card = RunCard(
        stores=(StoreReference(path=str(store_dir), fingerprint=manifest.fingerprint()),),
        plan_fingerprint="p",
        target=target.identity,
        tokenizer=tokenizer_identity(tokenizer),
        data=(manifest.data,),
        hidden_states_dtype="bfloat16",
        drafter=drafter.config.to_dict(),
        settings={},
        attempts=(Attempt(attempt=0, started_at=0.0, from_step=0, world_size=1, threads=1, device="cpu", versions={}),),
    )
    checkpoint = checkpoint_dir(run, 7)
    checkpoint.mkdir(parents=True)
    (run / "run.json").write_text(card.model_dump_json())
    file = checkpoint / "drafter.safetensors"
    save_file(drafter.state_dict(), file)
    state = TrainState(
        step=7,
        attempt=0,
        plan_fingerprint="p",
        store_fingerprints=("s",),
        drafter_fingerprint="d",
        settings_fingerprint="t",
        threads=1,
        skipped_steps=0,
        consecutive_skipped_steps=0,
        best_step=7,
        best_loss=1.0,
        versions={},
        files={file.name: (file.stat().st_size, checksum_of_file(file))},
    )
    (checkpoint / "state.json").write_text(state.model_dump_json())
    record = EvaluationRecord(
        step=7,
        attempt=0,
        num_samples=3,
        loss=5.0,
        accuracy_by_slot=(0.0,) * 5,
        count_by_slot=(1,) * 5,
        acceptance_length=1.01,
        num_blocks=10,
        num_truncated_blocks=0,
        by_bucket=(),
        seconds=1.0,
        finished_at=0.0,
    )
    (run / "evaluation.jsonl").write_text(record.model_dump_json() + "\n" + json.dumps({"cut": "off"})[:5])
    return run
