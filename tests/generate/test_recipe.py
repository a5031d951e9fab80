"""The chat recipe and its prompts are what the pages say."""

import re
import tomllib
from pathlib import Path

from tiny_models import make_tiny_tokenizer

from dflash_tools.config import DataSection, GenerateConfig, load_config
from dflash_tools.data import RowResult, load_tokenizer, read_rows, resolve_data
from dflash_tools.generate.prompts import PromptReader

ROOT = Path(__file__).parents[2]
MANIFEST = DataSection(manifest=str(ROOT / "data_manifests" / "chat-demo.toml"))
PAGE = (ROOT / "docs" / "generate.md").read_text(encoding="utf-8")


def test_sixty_prompts_are_asked_four_times_each_and_ten_have_a_second_question():
    prompts = list(PromptReader(resolve_data(MANIFEST, ROOT), {"<|im_end|>"}).read())
    assert not any(isinstance(prompt, RowResult) for prompt in prompts)
    assert len(prompts) == 240
    questions = {prompt.questions.fingerprint: len(prompt.questions.turns) for prompt in prompts}
    assert sorted(questions.values()) == [1] * 50 + [2] * 10


def test_the_foreign_answers_are_read_as_they_are(tmp_path):
    make_tiny_tokenizer(tmp_path)
    results = list(read_rows(resolve_data(MANIFEST, ROOT), load_tokenizer(str(tmp_path)), strict=True))
    assert len(results) == 60
    assert all(len(result.samples) == 4 for result in results)


def test_the_recipe_is_a_config():
    config = load_config(ROOT / "pipelines" / "chat-demo" / "generate.toml", GenerateConfig)
    extract = tomllib.loads((ROOT / "pipelines" / "chat-demo" / "extract.toml").read_text())
    assert extract["target"]["gguf_file"] == config.target.gguf_file
    assert extract["data"]["manifest"] == "chat-demo-out/chats.toml"


def test_the_config_on_the_page_is_a_config(tmp_path):
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "generate.toml").write_text(block)
    config = load_config(tmp_path / "generate.toml", GenerateConfig)
    assert config.sampling == type(config.sampling)()  # the page shows the defaults


def test_every_reason_of_the_code_stands_on_the_page():
    code = "".join(path.read_text() for path in (ROOT / "dflash_tools" / "generate").glob("*.py"))
    reasons = set(re.findall(r'RowError\(\s*"(\w+)"', code)) | {"no_answer", "refused_by_server"}
    described = PAGE + (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert {reason for reason in reasons if f"`{reason}`" not in described} == set()
