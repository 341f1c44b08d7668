"""Tiny random models of more families; see `tests.tiny`. ``fields`` go to the config."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.tiny import HEAD_DIM, HEADS, HIDDEN_SIZE, VOCAB_SIZE, randomised, sizes


def tiny_starcoder2(kind: str = "GQA", *, tied: bool = True, **fields: Any) -> PreTrainedModel:
    return _dense("Starcoder2", kind, tied, fields, norm_epsilon=2e-5)


def tiny_gemma(
    kind: str = "MQA", *, tied: bool = True, dtype: torch.dtype = torch.float32, **fields: Any
) -> PreTrainedModel:
    """Heads twice as wide as D/H."""
    config = transformers.GemmaConfig(**{**sizes(kind, tied), "head_dim": 2 * HEAD_DIM, **fields})
    return randomised(transformers.GemmaForCausalLM, config, dtype, norm_weight=0.0)


def tiny_granite(kind: str = "GQA", *, tied: bool = True, **fields: Any) -> PreTrainedModel:
    """With factors on embeddings, scores, residual branches and logits that are all unlike 1."""
    factors = {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.7,
    }
    return _dense("Granite", kind, tied, fields, **factors)


def tiny_stablelm(kind: str = "GQA", *, tied: bool = False, **fields: Any) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return _dense("StableLm", kind, tied, fields, layer_norm_eps=2e-5, rope_parameters=rope)


def tiny_cohere(kind: str = "GQA", *, tied: bool = True, **fields: Any) -> PreTrainedModel:
    return _dense("Cohere", kind, tied, fields, layer_norm_eps=2e-5, logit_scale=0.3)


def tiny_mixtral(kind: str = "GQA", *, tied: bool = False, **fields: Any) -> PreTrainedModel:
    """Two of three experts answer a token."""
    return _dense("Mixtral", kind, tied, fields, num_local_experts=3, num_experts_per_tok=2)


def tiny_qwen2_moe(kind: str = "GQA", *, tied: bool = False, **fields: Any) -> PreTrainedModel:
    """Two of four experts answer a token, and the shared one."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return _dense("Qwen2Moe", kind, tied, fields, **experts, shared_expert_intermediate_size=40)


def tiny_qwen3_moe(kind: str = "GQA", *, tied: bool = False, **fields: Any) -> PreTrainedModel:
    """Two of four experts answer a token."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return _dense("Qwen3Moe", kind, tied, fields, **experts)


def tiny_gpt_neox(*, tied: bool = False, **fields: Any) -> PreTrainedModel:
    """A quarter of each head turns."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return _dense("GPTNeoX", "MHA", tied, fields, layer_norm_eps=2e-5, rope_parameters=rope)


def tiny_falcon(*, tied: bool = True, **fields: Any) -> PreTrainedModel:
    """Falcon 7B's form unless ``fields`` say otherwise."""
    return _dense("Falcon", "MHA", tied, fields, layer_norm_epsilon=2e-5, ffn_hidden_size=96)


def tiny_gpt2(*, tied: bool = True, dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    config = transformers.GPT2Config(
        **{
            "vocab_size": VOCAB_SIZE,
            "n_embd": HIDDEN_SIZE,
            "n_head": HEADS,
            "n_layer": 2,
            "n_positions": 256,
            "layer_norm_epsilon": 2e-5,
            "tie_word_embeddings": tied,
            **_special_tokens(),
            **fields,
        }
    )
    return randomised(transformers.GPT2LMHeadModel, config, dtype)


def tiny_bloom(*, tied: bool = True, dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    config = transformers.BloomConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "n_head": HEADS,
            "n_layer": 2,
            "layer_norm_epsilon": 2e-5,
            "tie_word_embeddings": tied,
            **_special_tokens(),
            **fields,
        }
    )
    return randomised(transformers.BloomForCausalLM, config, dtype)


def tiny_mpt(
    *, tied: bool = True, dtype: torch.dtype = torch.float32, attention: dict[str, Any] | None = None, **fields: Any
) -> PreTrainedModel:
    """``attention`` goes to ``attn_config``."""
    config = transformers.MptConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "d_model": HIDDEN_SIZE,
            "n_heads": HEADS,
            "n_layers": 2,
            "max_seq_len": 256,
            "layer_norm_epsilon": 2e-5,
            "attn_config": attention or {},
            "tie_word_embeddings": tied,
            **_special_tokens(),
            **fields,
        }
    )
    return randomised(transformers.MptForCausalLM, config, dtype)


def _dense(name: str, kind: str, tied: bool, fields: dict[str, Any], **own: Any) -> PreTrainedModel:
    """A model of the classes ``name``Config and ``name``ForCausalLM, of the sizes that the config has fields for."""
    config_class = getattr(transformers, f"{name}Config")
    dtype = fields.pop("dtype", torch.float32)
    common = {**sizes(kind, tied), **own}
    known = {field: value for field, value in common.items() if field != "head_dim" and hasattr(config_class(), field)}
    return randomised(getattr(transformers, f"{name}ForCausalLM"), config_class(**{**known, **fields}), dtype)


def _special_tokens() -> dict[str, int]:
    return {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
