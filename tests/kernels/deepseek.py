"""Tiny random DeepSeek models of transformers, and a run of one through its own cache."""

from __future__ import annotations

import inspect

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "max_position_embeddings": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    # Large enough for attention to prefer some tokens clearly.
    "initializer_range": 0.2,
}
# transformers renamed the argument and the output's field between 5.17 and 5.24.
CACHE = "cache" if "cache" in inspect.signature(DeepseekV3ForCausalLM.forward).parameters else "past_key_values"
# float32 logits of order 1 to 10 through two layers, summed in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def tiny_model(family, seed=0, **overrides):
    config_class, model_class = {
        "v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
        "v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    }[family]
    torch.manual_seed(seed)
    return model_class(config_class(**(SHAPE | {"q_lora_rank": None} | overrides))).eval()


def random_ids(batch, length, seed=1):
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def step_logits(model, ids, steps, mask=None, **kwargs):
    """Logits of a prompt and then of chunks of the given sizes, through the model's own cache."""
    logits, cache, start = [], kwargs.pop(CACHE, None), 0
    for count in steps:
        if mask is not None:
            kwargs["attention_mask"] = mask[:, : start + count]
        output = model(ids[:, start : start + count], use_cache=True, **{CACHE: cache}, **kwargs)
        logits.append(output.logits)
        cache, start = output[CACHE], start + count
    return torch.cat(logits, dim=1)
