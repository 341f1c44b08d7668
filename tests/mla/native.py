"""Random native models whose every size differs, and what they must answer, written out in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_convert.mla import MLAConfig, MLAForCausalLM

LAYERS, VOCAB = 3, 53
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 7,
    "attention_scale": 0.35,
    "rms_norm_eps": 1e-5,
    "rope_inv_freq": [[1.0, 0.5, 0.5], [1.0, 0.03, 0.002], [0.7, 0.2, 0.0001]],
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"query_bias": True, "latent_bias": True, "output_bias": True, "mlp_bias": True},
    "latent-bias": {"latent_bias": True},
    "wide-latent": {"kv_lora_rank": 40},  # more than H heads' keys or values hold: absorption costs more
    "one-head": {"num_attention_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "yarn": {"rope_attention_scaling": 1.2},
    "windows": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5},
    "all-windows": {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 4},
    "no-rope": {"qk_rope_head_dim": 0, "rope_inv_freq": [[]] * LAYERS},
    "unequal": {
        "kv_lora_rank": 17,
        "kv_lora_ranks": [10, 17, 5],
        "qk_rope_head_dims": [4, 0, 6],
        "rope_inv_freq": [[1.0, 0.03], [], [0.7, 0.2, 0.0001]],
        "query_bias": True,
        "latent_bias": True,
    },
}


def native(variant: str = "plain", *, seed: int = 0, **changes: Any) -> MLAForCausalLM:
    """A model of that variant; no weight is at its initial value, and attention is far from uniform."""
    model = MLAForCausalLM(MLAConfig(**{**SIZES, **VARIANTS[variant], **changes})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * parameter.shape[1] ** -0.5 * (1.5 if "q_proj" in name else 1.0))
    return model


def tokens(batch: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def cache_of(outputs: Any) -> Any:
    """The cache that a model returned, whichever name this transformers has for it."""
    return next(outputs[name] for name in ("cache", "past_key_values") if outputs.get(name) is not None)


def logits_by_hand(model: MLAForCausalLM, ids: Tensor, *, first_position: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Logits [S vocabulary] of one sequence [S] and each layer's attention [H S S], from DeepSeek-V2's equations.

    Keys and values are rebuilt for every head; rotary pairs are complex numbers.
    """
    config = model.config
    weights = {name: value.detach().double() for name, value in model.state_dict().items()}
    heads, nope, value_dim = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    length = len(ids)
    positions = torch.arange(length, dtype=torch.float64) + first_position

    def linear(name: str, x: Tensor) -> Tensor:
        out = x @ weights[f"{name}.weight"].T
        return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out

    def norm(name: str, x: Tensor) -> Tensor:
        return weights[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def turn(x: Tensor, frequencies: list[float]) -> Tensor:
        """[... S R]: pair n is dims n and n + R/2."""
        angles = positions[:, None] * torch.tensor(frequencies, dtype=torch.float64)
        turns = torch.complex(angles.cos(), angles.sin()) * config.rope_attention_scaling
        turned = torch.complex(*x.chunk(2, dim=-1)) * turns
        return torch.cat((turned.real, turned.imag), dim=-1)

    x = weights["model.embed_tokens.weight"][ids]
    attentions: list[Tensor] = []
    for i in range(config.num_hidden_layers):
        name = f"model.layers.{i}"
        rope = 2 * len(config.rope_inv_freq[i])
        rank = weights[f"{name}.self_attn.kv_b_proj.weight"].shape[1]
        normed = norm(f"{name}.input_layernorm", x)
        query = linear(f"{name}.self_attn.q_proj", normed).unflatten(1, (heads, nope + rope)).transpose(0, 1)
        compressed = linear(f"{name}.self_attn.kv_a_proj_with_mqa", normed)
        latent, k_rope = compressed[:, :rank], turn(compressed[:, rank:], config.rope_inv_freq[i])
        up = weights[f"{name}.self_attn.kv_b_proj.weight"].unflatten(0, (heads, nope + value_dim))
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        hidden = distance < 0
        if config.layer_types is not None and config.layer_types[i] == "sliding_attention":
            hidden = hidden | (distance >= config.sliding_window)
        outputs, layer_weights = [], []
        for h in range(heads):
            keys, values = latent @ up[h, :nope].T, latent @ up[h, nope:].T
            scores = query[h, :, :nope] @ keys.T
            scores = scores + turn(query[h, :, nope:], config.rope_inv_freq[i]) @ k_rope.T
            attention = (scores * config.attention_scale).masked_fill(hidden, float("-inf")).softmax(-1)
            layer_weights.append(attention)
            outputs.append(attention @ values)
        attentions.append(torch.stack(layer_weights))
        x = x + linear(f"{name}.self_attn.o_proj", torch.cat(outputs, dim=1))
        normed = norm(f"{name}.post_attention_layernorm", x)
        gated = torch.nn.functional.silu(linear(f"{name}.mlp.gate_proj", normed))
        x = x + linear(f"{name}.mlp.down_proj", gated * linear(f"{name}.mlp.up_proj", normed))
    return linear("lm_head", norm("model.norm", x)), attentions
