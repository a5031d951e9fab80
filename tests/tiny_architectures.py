"""Random tiny models of many architectures, built in code; each has 6 layers of width 32 and 1,000 tokens."""

import torch

COMMON = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = ["linear_attention", "linear_attention", "full_attention"] * 2
MIXED = ["sliding_attention", "full_attention"] * 3
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}

ARCHITECTURES = {
    "llama": ("Llama", {**COMMON}),
    "qwen2": ("Qwen2", {**COMMON}),
    "qwen3": ("Qwen3", {**COMMON, "head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", {**COMMON, **MOE, "head_dim": 16}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **COMMON,
            **MOE,
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "layer_types": LINEAR,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "gemma2": ("Gemma2", {**COMMON, "head_dim": 16, "layer_types": MIXED, "sliding_window": 8}),
    "gemma3_text": ("Gemma3", {**COMMON, "head_dim": 16, "layer_types": MIXED, "sliding_window": 8}),
    "phi": ("Phi", {**COMMON}),
    "phi3": ("Phi3", {**COMMON}),
    "gpt_oss": (
        "GptOss",
        {
            **COMMON,
            "head_dim": 16,
            "layer_types": MIXED,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "mistral": ("Mistral", {**COMMON, "head_dim": 8, "sliding_window": 8}),
    "granite": ("Granite", {**COMMON, "logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "cohere": ("Cohere", {**COMMON}),
    "gpt2": (
        "GPT2",
        {"vocab_size": 1000, "n_embd": 32, "n_layer": 6, "n_head": 4, "n_positions": 256, "bos_token_id": 1},
    ),
    "opt": (
        "OPT",
        {
            "vocab_size": 1000,
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 256,
        },
    ),
}


def make_architecture(name, folder, *, seed=0):
    """Save a random model in float32 and return its folder."""
    import transformers

    prefix, fields = ARCHITECTURES[name]
    config_name = "Gemma3TextConfig" if name == "gemma3_text" else f"{prefix}Config"
    model_name = "GPT2LMHeadModel" if name == "gpt2" else f"{prefix}ForCausalLM"
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**fields))
    for parameter in model.parameters():  # norms too, so that a forgotten factor shows
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def make_gemma3_wrapper(folder, *, seed=0):
    """Save a random multimodal Gemma 3, whose text model lies inside; return its folder."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(seed)
    config = Gemma3Config(
        text_config={**COMMON, "head_dim": 16, "layer_types": MIXED, "sliding_window": 8},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=999,
        boi_token_index=998,
        eoi_token_index=997,
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder
