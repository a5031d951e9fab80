import pytest

from dflash_tools.contracts.manifest import TokenizerIdentity
from dflash_tools.drafter.mask_token import choose_mask_token
from dflash_tools.errors import ConfigError


def identity(**changes) -> TokenizerIdentity:
    values = {
        "fingerprint": "",
        "chat_template_fingerprint": None,
        "num_tokens": 50,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "pad_token_id": 2,
        "mask_token_id": None,
        "control_token_ids": (0, 1, 2, 3, 4),
        "used_control_token_ids": (1, 2, 4),
    }
    return TokenizerIdentity(**(values | changes))


def test_the_given_token_wins_even_if_it_is_the_padding_token():
    assert choose_mask_token(2, identity(mask_token_id=40), 64) == 2


@pytest.mark.parametrize("token", [-1, 64, 151_669])
def test_a_given_token_outside_the_embedding_is_refused(token):
    with pytest.raises(ConfigError, match=rf"mask_token_id = {token} is no row of the target's embedding \(64 rows\)"):
        choose_mask_token(token, identity(), 64)


def test_then_comes_the_tokenizers_own_mask_token():
    assert choose_mask_token(None, identity(mask_token_id=40), 64) == 40


@pytest.mark.parametrize("own", [2, 64, 4])
def test_an_own_mask_token_that_is_padding_or_outside_or_in_the_data_is_passed_over(own):
    assert choose_mask_token(None, identity(mask_token_id=own), 64) == 50


def test_then_comes_the_first_row_past_the_tokenizer():
    assert choose_mask_token(None, identity(), 64) == 50
    assert choose_mask_token(None, identity(control_token_ids=(0, 55)), 64) == 56


def test_then_comes_the_last_control_token_that_the_data_never_uses():
    assert choose_mask_token(None, identity(), 50) == 3
    assert choose_mask_token(None, identity(used_control_token_ids=(1, 2, 3, 4)), 50) == 0


def test_when_nothing_is_left_the_user_must_choose():
    with pytest.raises(ConfigError, match=r"set drafter\.mask_token_id"):
        choose_mask_token(None, identity(used_control_token_ids=(0, 3, 4)), 50)
