"""Loading a tokenizer, its identity, and a sample made readable."""

import pytest

from dflash_tools.data import TokenSample, load_tokenizer, show_sample, tokenizer_identity
from dflash_tools.data.tokenizer import template_sources
from dflash_tools.errors import ConfigError, DataError


@pytest.mark.parametrize("name", ["qwen3", "gemma", "phi3"])
def test_a_tokenizer_is_the_same_one_after_it_was_saved(family, tmp_path, name):
    tokenizer = family(name)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_identity(load_tokenizer(str(tmp_path))) == tokenizer_identity(tokenizer)


def test_the_identity_names_control_tokens_and_changes_with_vocabulary_and_template(family):
    identity = tokenizer_identity(family("qwen3"))
    tokenizer = family("qwen3")
    for token in ("<|im_start|>", "<think>", "<tool_call>"):
        assert tokenizer.convert_tokens_to_ids(token) in identity.control_token_ids
    assert identity.num_tokens == len(tokenizer)
    assert identity.eos_token_ids == (tokenizer.eos_token_id,)
    other = tokenizer_identity(family("qwen2"))
    assert other.fingerprint == identity.fingerprint
    assert other.chat_template_fingerprint != identity.chat_template_fingerprint
    assert tokenizer_identity(family("llama3")).fingerprint != identity.fingerprint


def test_a_template_file_replaces_the_tokenizers_own(family, tmp_path):
    family("qwen2").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), chat_template="mine").chat_template == "mine"


def test_a_model_without_a_tokenizer_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="no installed package"):
        load_tokenizer("package:nothing_like_this")


def test_of_several_templates_rows_with_tools_take_the_one_for_tools(family):
    class Several:
        chat_template = {"default": "a", "tool_use": "b"}  # noqa: RUF012

    assert template_sources(Several()) == ("a", "b")
    Several.chat_template = {"default": "a"}
    assert template_sources(Several()) == ("a", "a")
    Several.chat_template = {"rag": "c"}
    with pytest.raises(DataError, match="rag and no default"):
        template_sources(Several())


def test_a_sample_is_shown_with_what_is_supervised_in_colour(tokenizer):
    import numpy as np

    ids = tokenizer("the fox<|im_end|>the dog<|im_end|>é")["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    mask = np.zeros(len(ids), np.uint8)
    mask[ids.index(end) + 1 : -1] = 1
    sample = TokenSample(input_ids=np.array(ids, np.int32), loss_mask=mask, conversation_id="0" * 32)
    text = show_sample(tokenizer, sample)
    assert text.plain.startswith("the fox<|im_end|>the dog<|im_end|>")
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["the dog"] == "green"
    assert "the fox" not in styles
    assert "reverse" in styles["<|im_end|>"]
    assert show_sample(tokenizer, sample, max_tokens=1).plain.endswith("more tokens")
