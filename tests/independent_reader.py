"""A second, independent reader of an exported drafter: plain torch, written from docs/method.md alone.

It shares no code with the package, so that a mistake made in both places would have to be made twice.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


class Reader:
    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}

    def norm(self, x, name):
        scaled = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return scaled * self.weights[name]

    def rotate(self, x, positions):
        """x [n, heads, d]; halves of a head are rotated against each other."""
        d = self.config["head_dim"]
        angle = positions[:, None].double() * self.config["rope_theta"] ** (-torch.arange(0, d, 2).double() / d)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        left, right = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def heads(self, x, count):
        return x.reshape(x.shape[0], count, self.config["head_dim"])

    def attention(self, layer, block, context, start):
        c, w = self.config, self.weights
        at = f"layers.{layer}.self_attn."
        num_q, num_kv = c["num_attention_heads"], c["num_key_value_heads"]
        normed = self.norm(block, f"layers.{layer}.input_layernorm.weight")
        both = torch.cat([context, normed])  # the context is not normed again
        positions = torch.arange(both.shape[0])
        q = self.norm(self.heads(normed @ w[at + "q_proj.weight"].T, num_q), at + "q_norm.weight")
        k = self.norm(self.heads(both @ w[at + "k_proj.weight"].T, num_kv), at + "k_norm.weight")
        v = self.heads(both @ w[at + "v_proj.weight"].T, num_kv)
        q, k = self.rotate(q, positions[start:]), self.rotate(k, positions)
        mixed = torch.zeros(block.shape[0], num_q, c["head_dim"], dtype=torch.double)
        for head in range(num_q):
            group = head // (num_q // num_kv)
            scores = q[:, head] @ k[:, group].T / c["head_dim"] ** 0.5
            if c["layer_types"][layer] == "sliding_attention":
                distance = positions[start:, None] - positions[None]
                scores = scores.masked_fill((distance < 0) | (distance >= c["sliding_window"]), float("-inf"))
            mixed[:, head] = scores.softmax(-1) @ v[:, group]
        return mixed.flatten(1) @ w[at + "o_proj.weight"].T

    def draft(self, states, anchor_id, embedding, head):
        """Logits of every slot after the anchor: states [t, K, H] of all tokens before it."""
        c, w = self.config, self.weights
        ids = [anchor_id] + [c["dflash_config"]["mask_token_id"]] * (c["block_size"] - 1)
        context = self.norm(states.double().flatten(1) @ w["fc.weight"].T, "hidden_norm.weight")
        x = embedding.double()[ids]
        for layer in range(c["num_hidden_layers"]):
            x = x + self.attention(layer, x, context, start=states.shape[0])
            at = f"layers.{layer}.mlp."
            y = self.norm(x, f"layers.{layer}.post_attention_layernorm.weight")
            gated = torch.nn.functional.silu(y @ w[at + "gate_proj.weight"].T) * (y @ w[at + "up_proj.weight"].T)
            x = x + gated @ w[at + "down_proj.weight"].T
        return (self.norm(x, "norm.weight") @ head.double().T)[1:]
