from dataclasses import replace

import pytest

from dflash_tools.config import DrafterSection
from dflash_tools.contracts.manifest import (
    Accounting,
    DataIdentity,
    StoreManifest,
    TargetIdentity,
    TokenizerIdentity,
)
from dflash_tools.drafter.config import DrafterConfig, resolve_decay_gamma, resolve_drafter
from dflash_tools.errors import ConfigError

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "attention_bias": True,
    "hidden_act": "gelu",
}


def make_manifest(**changes) -> StoreManifest:
    manifest = StoreManifest(
        target=TargetIdentity(
            model="m",
            revision=None,
            gguf_file=None,
            architecture="LlamaForCausalLM",
            model_type="llama",
            num_hidden_layers=8,
            hidden_size=64,
            vocab_size=100,
            dtype="bfloat16",
            quantization=None,
            attn_implementation="sdpa",
            config_fingerprint="",
        ),
        target_layer_ids=(1, 3, 5),
        hidden_size=64,
        hidden_states_dtype="bfloat16",
        codec="none",
        last_hidden_state=None,
        tokenizer=TokenizerIdentity(
            fingerprint="",
            chat_template_fingerprint=None,
            num_tokens=90,
            bos_token_id=1,
            eos_token_ids=(2,),
            pad_token_id=2,
            mask_token_id=None,
            control_token_ids=(0, 1, 2, 3),
            used_control_token_ids=(1, 2),
        ),
        data=DataIdentity(
            name="d",
            sources=(),
            content_fingerprint="",
            chat_template_kwargs={},
            max_tokens=1,
            too_long="drop",
            loss_on="all",
            validation_fraction=0.0,
        ),
        accounting=Accounting(read=0, kept=0, dropped=0, merged=0, dropped_by_reason={}),
        buckets=(),
        num_samples=0,
        num_tokens=0,
        num_supervised_tokens=0,
        num_bytes=0,
        forward_token_budget=1,
        threads=1,
        index_fingerprint="",
        versions={},
        files={},
    )
    return manifest.model_copy(update=changes)


def resolve(section=None, target=LLAMA, **changes) -> DrafterConfig:
    return resolve_drafter(DrafterSection(**(section or {})), target, make_manifest(**changes))


def test_a_dense_target_gives_every_default():
    assert resolve().to_dict() == {
        "hidden_size": 64,
        "vocab_size": 100,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 160,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * 5,
        "sliding_window": None,
        "block_size": 16,
        "mask_token_id": 90,
        "target_layer_ids": [1, 3, 5],
        "num_target_layers": 8,
    }


def test_what_the_section_names_wins_over_the_target():
    config = resolve({"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 10})
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 2, 32)
    assert config.intermediate_size == 10


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e4},
        {"rope_parameters": {"rope_theta": 5e4}},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e4}, "sliding_attention": {"rope_theta": 1e4}}},
        {"rope_theta": 5e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ],
)
def test_the_rope_base_is_found_in_every_style_and_scaling_is_not_inherited(rope):
    target = {key: value for key, value in LLAMA.items() if key != "rope_parameters"} | rope
    assert resolve(target=target).rope_theta == 5e4


def test_a_missing_rope_base_is_an_error_and_not_ten_thousand():
    with pytest.raises(ConfigError, match=r"no rope_theta; set drafter\.rope_theta"):
        resolve(target={key: value for key, value in LLAMA.items() if key != "rope_parameters"})


def test_the_language_model_of_a_multimodal_target_counts():
    assert resolve(target={"text_config": LLAMA, "num_attention_heads": 3}).num_attention_heads == 8


def test_experts_never_lend_their_width():
    moe = LLAMA | {"num_experts": 64, "moe_intermediate_size": 12}
    with pytest.raises(ConfigError, match=r"has num_experts.*set drafter\.intermediate_size"):
        resolve(target=moe)
    assert resolve({"intermediate_size": 200}, target=moe).intermediate_size == 200


def test_latent_attention_never_lends_its_shape():
    latent = LLAMA | {"kv_lora_rank": 512}
    with pytest.raises(ConfigError, match=r"has kv_lora_rank.*set drafter\.num_attention_heads"):
        resolve(target=latent)
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    assert resolve(shape, target=latent).head_dim == 16


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"target_layer_ids": (1, 2)}, r"layers \[2\], but the store holds \[1, 3, 5\]"),
        ({"target_layer_ids": (1, 1)}, "expected different ids"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads = 3"),
        ({"head_dim": 7}, "odd"),
        ({"layer_types": ("full_attention",)}, "1 entries, expected num_hidden_layers = 5"),
        ({"layer_types": ("sliding_attention",) * 5}, "give the window"),
        ({"sliding_window": 8}, "no sliding layer; remove it"),
        ({"mask_token_id": 100}, "no row of the target's embedding"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_advice(section, message):
    with pytest.raises(ConfigError, match=message):
        resolve(section)


def test_the_last_layer_of_the_target_is_refused():
    assert replace(resolve(), target_layer_ids=(1, 6)).num_target_layers == 8
    with pytest.raises(ConfigError, match=r"target_layer_ids = \[1, 7\]: expected different ids from 0 to 6"):
        replace(resolve(), target_layer_ids=(1, 7))


def test_a_subset_of_the_stored_layers_is_found_by_column_in_the_drafters_order():
    config = resolve({"target_layer_ids": (5, 1)})
    assert config.columns_of((1, 3, 5)) == [2, 0]


def test_a_configuration_survives_its_dictionary_and_keeps_its_fingerprint():
    config = resolve({"layer_types": ("sliding_attention",) * 5, "sliding_window": 64})
    again = DrafterConfig.from_dict(config.to_dict())
    assert again == config
    assert again.fingerprint() == config.fingerprint()
    assert resolve().fingerprint() != config.fingerprint()


def test_a_dictionary_with_other_keys_is_refused():
    values = resolve().to_dict()
    with pytest.raises(ConfigError, match=r"missing keys \['head_dim'\], unknown keys \['heads'\]"):
        DrafterConfig.from_dict({key: value for key, value in values.items() if key != "head_dim"} | {"heads": 1})


def test_the_decay_follows_the_block_size_unless_given():
    assert [resolve_decay_gamma(None, size) for size in (16, 10, 8, 6)] == [7.0, 5.0, 4.0, 3.0]
    assert resolve_decay_gamma(2.5, 16) == 2.5
