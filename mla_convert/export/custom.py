"""The exported class: transformers' DeepSeek-V3 attention with a converted layer's own frequencies, biases and scale.

Its weights are those of the native format, bit for bit, with zeros added where layers or engines need one size: the
latent's norm, which DeepSeek's attention has and a converted layer has not, is given an eps so large that it multiplies
by a power of two, and a weight that divides by it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mla_convert.export.carried import common_config, copied_tensors, stored
from mla_convert.export.converted import ConvertedModel
from mla_convert.export.padding import pad_latent, place_slots
from mla_convert.export.shards import ShardWriter
from mla_convert.mla import (
    DeepseekMLAConfig,
    MLAWeights,
    configuration_deepseek_mla,
    modeling_deepseek_mla,
)
from mla_convert.mla.names import to_hf
from mla_convert.progress import Progress, silent

# sqrt(eps) is what the norm divides by and its weight multiplies by: a power of two, so neither rounds. At 2^30 a mean
# square of 10^6 changes the factor by less than 2^-40; float16 holds neither 2^30 nor what is left of a latent divided
# by it, and rounds to 11 bits anyway.
_DIVISORS = {torch.float32: 2.0**30, torch.bfloat16: 2.0**30, torch.float16: 2.0**8}

_CODE = (configuration_deepseek_mla, modeling_deepseek_mla)


def write_custom(
    model: ConvertedModel,
    kv_rank: int,
    rope_dim: int,
    folder: Path,
    *,
    dtype: torch.dtype,
    served: bool = False,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` loads.

    At most one layer is in memory.

    Args:
        kv_rank, rope_dim: C and R of every layer as written, at least those of the widest layer.
        served: see :func:`custom_config`.

    Raises:
        FormatError: float16 cannot hold a weight.
        OutputError: the folder cannot be written.
        ValueError: a layer does not fit into C and R.
    """
    progress = progress or silent
    count = model.spec.num_layers
    with ShardWriter(folder, max_shard_size) as writer:
        for name, tensor in copied_tensors(model, None, dtype):
            writer.add(name, tensor)
        for i in range(count):
            tensors = custom_layer(model.layer(i), kv_rank, rope_dim, dtype, _input_norm(model, i))
            for name, tensor in tensors.items():
                writer.add(f"model.layers.{i}.self_attn.{name}", tensor)
            del tensors  # or they would live on while the next layer is read
            for name, tensor in copied_tensors(model, i, dtype):
                writer.add(name, tensor)
            progress("write", i + 1, count)
    custom_config(model, kv_rank, rope_dim, dtype=dtype, served=served).save_pretrained(folder)
    for module in _CODE:
        shutil.copyfile(str(module.__file__), folder / Path(str(module.__file__)).name)
    model.save_companions(folder)


def custom_config(
    model: ConvertedModel, kv_rank: int, rope_dim: int, *, dtype: torch.dtype, served: bool = False
) -> DeepseekMLAConfig:
    """Return the config of the exported class.

    Args:
        served: for engines whose latent attention has no sliding windows: the context ends where the shortest window
            would cut something off.
    """
    c, spec = model.config, model.spec
    fields: dict[str, Any] = {
        "architectures": ["DeepseekMLAForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deepseek_mla.DeepseekMLAConfig",
            "AutoModel": "modeling_deepseek_mla.DeepseekMLAModel",
            "AutoModelForCausalLM": "modeling_deepseek_mla.DeepseekMLAForCausalLM",
        },
        "dtype": dtype,
        "num_key_value_heads": spec.num_heads,
        "kv_lora_rank": kv_rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "v_head_dim": c.v_head_dim,
        "rope_inv_freq": [list(_padded(row, rope_dim)) for row in model.frequencies],
        "rope_attention_scaling": c.rope_attention_scaling,
        "attention_scale": c.attention_scale,
        "latent_norm_eps": _DIVISORS[dtype] ** 2,
        "rms_norm_eps": c.rms_norm_eps,
        "query_bias": c.query_bias,
        "latent_bias": c.latent_bias,
        "output_bias": c.output_bias,
        "mlp_bias": c.mlp_bias,
        "layer_types": None if served else c.layer_types,
        "sliding_window": None if served else c.sliding_window,
        "max_position_embeddings": unwindowed_positions(model) if served else c.max_position_embeddings,
        "tie_word_embeddings": c.tie_word_embeddings,
        # no layer has experts: vLLM takes a model with any for a mixture
        "first_k_dense_replace": spec.num_layers,
        "moe_intermediate_size": spec.intermediate_size,
        "n_routed_experts": 0,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    }
    return DeepseekMLAConfig(**fields, **common_config(model))


def unwindowed_positions(model: ConvertedModel) -> int:
    """Return the context up to which no sliding window cuts anything off."""
    windows = [window for window in model.spec.windows if window is not None]
    return min([model.spec.max_position_embeddings, *windows])


def custom_layer(
    weights: MLAWeights, kv_rank: int, rope_dim: int, dtype: torch.dtype, input_norm: Float[Tensor, " D"]
) -> Mapping[str, Tensor]:
    """Return the layer's tensors in `dtype` under DeepSeek's names (below ``self_attn.``).

    For float16, in which the norm is a factor only for latents of ordinary size, the latent is scaled by a power of two
    to a root mean square near one for inputs whose channels `input_norm`, the weight of the norm before them, scales.

    Raises:
        FormatError: float16 cannot hold one of them.
        ValueError: the layer does not fit into C and R.
    """
    if weights.shape.rope_dim > rope_dim:
        raise ValueError(f"a RoPE key of {weights.shape.rope_dim} does not fit into {rope_dim}")
    if dtype == torch.float16:
        weights = _ordinary(weights, input_norm)
    padded = place_slots(pad_latent(weights, kv_rank), _padded(weights.inv_freq, rope_dim))
    divisor = torch.full((kv_rank,), _DIVISORS[dtype])
    tensors = {**to_hf(padded), "kv_a_layernorm.weight": divisor}
    return {name: stored(f"self_attn.{name}", tensor, dtype) for name, tensor in tensors.items()}


def _ordinary(weights: MLAWeights, input_norm: Float[Tensor, " D"]) -> MLAWeights:
    """Return the layer with its latent scaled by a power of two, to a mean square near one at uncorrelated inputs."""
    mean_square = float((weights.w_dkv.double() * input_norm.double()).square().sum() / weights.w_dkv.shape[0])
    if weights.b_dkv is not None:
        mean_square += float(weights.b_dkv.double().square().mean())
    if mean_square == 0:
        return weights
    scale = 2.0 ** -round(torch.log2(torch.tensor(mean_square)).item() / 2)
    return replace(
        weights,
        w_dkv=weights.w_dkv.float() * scale,
        b_dkv=None if weights.b_dkv is None else weights.b_dkv.float() * scale,
        w_uk=weights.w_uk.float() / scale,
        w_uv=weights.w_uv.float() / scale,
    )


def _padded(inv_freq: tuple[float, ...], rope_dim: int) -> tuple[float, ...]:
    return (*inv_freq, *(0.0,) * (rope_dim // 2 - len(inv_freq)))


def _input_norm(model: ConvertedModel, layer: int) -> Tensor:
    return model.tensor(f"model.layers.{layer}.input_layernorm.weight")
