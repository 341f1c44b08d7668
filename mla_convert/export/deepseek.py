"""The stock output format: a ``DeepseekV3ForCausalLM`` folder that unmodified transformers loads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from mla_convert.errors import FormatError
from mla_convert.export.carried import Carrier, common_config, common_names, copied_tensors
from mla_convert.export.deepseek_layer import LATENT_EPS, deepseek_layer
from mla_convert.export.obstacles import source_obstacles
from mla_convert.export.shards import ShardWriter
from mla_convert.mla import MLAWeights
from mla_convert.progress import Progress, silent
from mla_convert.spec import MLAShape, SourceSpec

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")

_WIDE = ("float32", "float64")
_NATIVE = "--format native, which holds any of this"


def check_deepseek(
    spec: SourceSpec,
    *,
    rope_parameters: Mapping[str, Any] | None = None,
    engine_eps: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[str, ...]:
    """Return what the stock class's constraints cost this source, as sentences for the record.

    Args:
        rope_parameters: of the folder to be written; by default the source's.
        engine_eps: see :func:`write_deepseek`.
        dtype: of the folder to be written.

    Raises:
        FormatError: the stock class cannot express the source, with the reason.
    """
    if dtype == torch.float16:
        raise FormatError(
            "float16 cannot hold the latent's rows, which this format scales by 2^-20", "--dtype bfloat16 or float32"
        )
    if obstacles := [*source_obstacles(spec)]:
        raise FormatError(f"the stock DeepSeek class cannot hold this model. {' '.join(obstacles)}", _NATIVE)
    if spec.layer_ropes is not None:
        raise FormatError("layers have RoPE of their own kinds, and the stock DeepSeek class has one", _NATIVE)
    if spec.mlp_bias:
        raise FormatError("the stock DeepSeek class has no biases in its feed-forward layers, the source has", _NATIVE)
    parameters = spec.rope.parameters if rope_parameters is None else rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise FormatError(f"RoPE of type {rope_type!r} has no fixed frequencies for the stock DeepSeek class", _NATIVE)
    if rope_type == "longrope" and parameters["short_factor"] != parameters["long_factor"]:
        raise FormatError("longrope factors that change with the length are not one set of frequencies", _NATIVE)

    slots = "All layers share the class's RoPE frequencies: slots are not chosen per layer."
    return slots, *_notes(spec, rope_type, dtype, engine_eps=engine_eps)


def _notes(spec: SourceSpec, rope_type: str, dtype: torch.dtype, *, engine_eps: bool) -> Iterator[str]:
    if rope_type not in ("default", "yarn"):
        yield (
            f"RoPE of type {rope_type} is for transformers (and engines that run its classes): vLLM's own DeepSeek "
            "class and llama.cpp read it wrongly without a word."
        )
    if spec.rms_norm_eps != LATENT_EPS:
        yield eps_note(spec, dtype, engine_eps=engine_eps)
    if spec.query_bias or spec.key_bias or spec.value_bias or spec.output_bias:
        yield "Biases are exact in transformers (attention_bias); other engines skip or misread them without a word."
    if spec.query_bias:
        yield "The query bias is carried by a query latent of rank D + 1: D·(D + 1) more weights a layer."
    if _positions(spec) < spec.max_position_embeddings:
        yield (
            f"The class has no sliding window: max_position_embeddings is the source's window, {_positions(spec)}, "
            f"instead of {spec.max_position_embeddings}; beyond it the two differ."
        )
    if spec.hidden_act != "silu":
        yield f"hidden_act {spec.hidden_act} is right in transformers; vLLM refuses it, llama.cpp uses silu."


def write_deepseek(
    source: Carrier,
    layers: Iterable[tuple[int, MLAWeights]],
    shape: MLAShape,
    folder: Path,
    *,
    dtype: torch.dtype,
    max_shard_size: int | str = "5GB",
    rope_parameters: Mapping[str, Any],
    progress: Progress | None = None,
    engine_eps: bool = True,
) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained(folder)`` loads as ``DeepseekV3ForCausalLM``.

    `layers` yields every layer once, with its index, in any order, and is consumed one at a time; at most one layer
    is in memory.

    Args:
        rope_parameters: transformers' ``rope_parameters`` of the folder, at whose frequencies for dim R all layers'
            slots must be; see :func:`longrope_parameters` for free ones.
        engine_eps: write rms_norm_eps 1e-6, on which all engines agree with transformers. Where the source's differs,
            the residual stream is scaled to match (see :func:`residual_scale`). False keeps the source's eps, which is
            right in transformers only.

    Raises:
        FormatError: the class cannot express the source, a layer's frequencies are not the class's, or dtype is
            float16, which cannot hold the scaled latent rows.
        OutputError: the folder cannot be written.
        ValueError: a layer is missing or of another shape, or only some layers have a bias.
    """
    progress = progress or silent
    spec = source.spec
    check_deepseek(spec, rope_parameters=rope_parameters, engine_eps=engine_eps, dtype=dtype)
    if shape.rope_dim < 2:
        raise FormatError("the stock DeepSeek class needs RoPE dims, the plan has none", "a --rope-dim of at least 2")
    config = deepseek_config(source, shape, dtype=dtype, rope_parameters=rope_parameters, engine_eps=engine_eps)
    rotary = DeepseekV3RotaryEmbedding(config)
    nope_factor = spec.attention_scale / _softmax_scale(config)
    rope_factor = nope_factor * (spec.rope.attention_scaling / rotary.attention_scaling) ** 2
    residual = residual_scale(spec, dtype) if engine_eps else 1.0
    written: dict[int, frozenset[str]] = {}
    with ShardWriter(folder, max_shard_size) as writer:
        for name, tensor in copied_tensors(source, None, dtype, {"embed_tokens": residual}):
            writer.add(name, tensor)
        if spec.tie_word_embeddings:  # not every engine ties
            writer.add("lm_head.weight", _copied_tensor(source, None, "model.embed_tokens.weight").to(dtype))
        for i, weights in layers:
            if weights.shape != shape:
                raise ValueError(f"layer {i} has shape {weights.shape}, expected {shape}")
            _check_frequencies(i, weights.inv_freq, rotary.inv_freq.tolist())
            tensors = deepseek_layer(
                weights,
                _copied_tensor(source, i, f"model.layers.{i}.input_layernorm.weight"),
                nope_factor=nope_factor,
                rope_factor=rope_factor,
                output_factor=residual,
            )
            for name, tensor in tensors.items():
                writer.add(f"model.layers.{i}.self_attn.{name}", tensor.to(dtype))
            for name, tensor in copied_tensors(source, i, dtype, {"down_proj": residual}):
                writer.add(name, tensor)
            written[i] = frozenset(tensors)
            del weights, tensors  # or they would live on while the next layer is made
            progress("write", len(written), spec.num_layers)
    names = common_names(written, spec.num_layers)
    config.attention_bias = "o_proj.bias" in names
    config.q_lora_rank = spec.hidden_size + 1 if "q_b_proj.weight" in names else None
    config.save_pretrained(folder)
    source.save_companions(folder)


def deepseek_config(
    source: Carrier,
    shape: MLAShape,
    *,
    dtype: torch.dtype,
    rope_parameters: Mapping[str, Any],
    engine_eps: bool = True,
) -> DeepseekV3Config:
    """Return the config of a dense DeepSeek-V3 model without biases and without a query latent."""
    fields: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "dtype": dtype,
        "num_key_value_heads": source.spec.num_heads,
        "kv_lora_rank": shape.kv_rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": shape.rope_dim,
        "qk_nope_head_dim": shape.nope_dim,
        "v_head_dim": shape.value_dim,
        "rope_parameters": dict(rope_parameters),
        "rope_interleave": True,
        "rms_norm_eps": LATENT_EPS if engine_eps else source.spec.rms_norm_eps,
        "max_position_embeddings": _positions(source.spec),
        "tie_word_embeddings": False,
        "attention_bias": False,
        # no layer has experts; these are the smallest numbers that engines accept
        "first_k_dense_replace": source.spec.num_layers,
        "moe_intermediate_size": source.spec.intermediate_size,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    }
    return DeepseekV3Config(**fields, **common_config(source))


def longrope_parameters(inv_freq: Sequence[float], theta: float, max_position_embeddings: int) -> dict[str, Any]:
    """Return ``rope_parameters`` under which transformers' classes rotate the R/2 slots at the frequencies given.

    The class computes 1 / (factor_l · theta^(2l/R)) in float32, so the factors are worked out against its own powers.

    Raises:
        FormatError: a frequency that is not positive, which no factor gives.
    """
    if not all(0 < frequency < math.inf for frequency in inv_freq):
        raise FormatError("longrope factors give positive frequencies only", _NATIVE)
    dim = 2 * len(inv_freq)
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    factors = [1.0 / (frequency * power) for frequency, power in zip(inv_freq, powers.tolist(), strict=True)]
    return {
        "rope_type": "longrope",
        "rope_theta": float(theta),
        "short_factor": factors,
        "long_factor": list(factors),
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": max_position_embeddings,
    }


def residual_scale(spec: SourceSpec, dtype: torch.dtype) -> float:
    """Return β such that norms with eps 1e-6 see β times the residual stream as the source's norms see it with theirs.

    With β = sqrt(1e-6/eps), βx / sqrt(mean((βx)²) + 1e-6) = x / sqrt(mean(x²) + eps): exact, when everything that
    writes to the residual stream (embedding, o_proj, down_proj) is scaled by β. It is 1 from 16 bits to 16 bits, where
    the product would have to be rounded again, which costs more than the eps.
    """
    if spec.dtype not in _WIDE and str(dtype).removeprefix("torch.") not in _WIDE:
        return 1.0
    return math.sqrt(LATENT_EPS / spec.rms_norm_eps)


def _positions(spec: SourceSpec) -> int:
    """The context up to which no sliding window cuts anything off."""
    return min([spec.max_position_embeddings, *(window for window in spec.windows if window is not None)])


def _softmax_scale(config: DeepseekV3Config) -> float:
    """The factor that the class puts on scores: (N + R)^-1/2, times YaRN's for some parameters."""
    with torch.device("meta"):
        return float(DeepseekV3Attention(config, layer_idx=0).scaling)


def _copied_tensor(source: Carrier, layer: int | None, target: str) -> torch.Tensor:
    return next(part.take(source.tensor(name)) for name, part in source.copied(layer) if part.target == target)


def eps_note(spec: SourceSpec, dtype: torch.dtype, *, engine_eps: bool = True) -> str:
    """What :func:`write_deepseek` does about an rms_norm_eps other than 1e-6."""
    if not engine_eps:
        return (
            f"rms_norm_eps is the source's {spec.rms_norm_eps:g}: right in transformers only, since other engines use "
            "it for the latent norm too."
        )
    why = f"engines take the latent norm's eps from the config, and transformers uses {LATENT_EPS:g} there"
    scale = residual_scale(spec, dtype)
    if scale != 1.0:
        return (
            f"rms_norm_eps is {LATENT_EPS:g}, since {why}. The residual stream is {scale:.4g} times the source's, at "
            f"which every norm is what it was with {spec.rms_norm_eps:g}."
        )
    return (
        f"rms_norm_eps is {LATENT_EPS:g} instead of the source's {spec.rms_norm_eps:g} in all norms, since {why}; the "
        "exact remedy, scaling the residual stream, would round the weights once more."
    )


def _check_frequencies(layer: int, found: Sequence[float], expected: Sequence[float]) -> None:
    """Raise FormatError where a slot's frequency is more than 1e-5 (relative) off the class's."""
    for slot, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if not math.isclose(mine, theirs, rel_tol=1e-5, abs_tol=1e-12):
            raise FormatError(
                f"layer {layer}'s RoPE slot {slot} turns by {mine:.8g} a position, the stock DeepSeek class by "
                f"{theirs:.8g}",
                "rope_parameters that give these frequencies, or --format native",
            )
