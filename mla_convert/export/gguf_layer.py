"""One layer in the form of llama.cpp's ``deepseek2`` attention: absorbed matrices, a linear norm, interleaved RoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from mla_convert.export.deepseek_layer import interleaved, latent_mean_square
from mla_convert.mla import MLAWeights
from mla_convert.spec import MLAShape

# The latent norm's largest relative departure from a constant factor. It is squared in a divergence: 1e-9 nats.
_DEPARTURE = 2.0**-16

# The size (root mean square) of the attention's input as written. The latent's rows need not be as small as the latent
# then, which matters to kernels that compute in float16. On SmolLM2, stored and computed in float16: KL 2e-3 with 2^-5,
# 8e-5 with 2^-8. Much below, the float16 scales of Q8_0's activations (of 1/127) would lose digits.
_INPUT_SIZE = 2.0**-8


def layer_shapes(shape: MLAShape, heads: int, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    """Return name (below ``blk.i.``) -> shape, rows first, of a dense layer's tensors in the order of the file."""
    c, r, n, v = shape.kv_rank, shape.rope_dim, shape.nope_dim, shape.value_dim
    return {
        "attn_norm.weight": (width,),
        "attn_q.weight": (heads * (n + r), width),
        "attn_kv_a_mqa.weight": (c + r, width),
        "attn_kv_a_norm.weight": (c,),
        "attn_k_b.weight": (heads, c, n),
        "attn_v_b.weight": (heads, v, c),
        "attn_output.weight": (width, heads * v),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (inner, width),
        "ffn_up.weight": (inner, width),
        "ffn_down.weight": (width, inner),
    }


def attention_tensors(
    weights: MLAWeights,
    input_norm: Float[Tensor, " D"],
    *,
    eps: float,
    nope_factor: float,
    rope_factor: float,
) -> Mapping[str, Tensor]:
    """Return the layer's norm and attention under llama.cpp's names (below ``blk.i.``), in float64.

    llama.cpp normalises the latent, x / sqrt(mean(x²) + eps) · w, with the eps of all its norms. Rows scaled by a small
    s make that a multiplication by w/sqrt(eps), and w = sqrt(eps)/s, which is stored in float32 in every file, undoes
    s. Every scale is a power of two, so that nothing is rounded by it.

    Args:
        input_norm: the weight of the RMSNorm before the attention; it bounds the latent: ‖x / input_norm‖² ≤ D.
        eps: of all norms.
        nope_factor: content scores are to be multiplied by it.
        rope_factor: RoPE scores likewise.
    """
    w, norm = weights.to(torch.float64), input_norm.to(torch.float64)
    scale = latent_scale(latent_mean_square(w.w_dkv, norm), eps)
    shrink = input_scale(norm)
    order = interleaved(w.w_kr.shape[0])
    return {
        "attn_norm.weight": norm * shrink,
        "attn_q.weight": torch.cat((w.w_uq * nope_factor, w.w_qr[:, order] * rope_factor), 1).flatten(0, 1) / shrink,
        "attn_kv_a_mqa.weight": torch.cat((w.w_dkv * scale, w.w_kr[order])) / shrink,
        "attn_kv_a_norm.weight": torch.full((w.w_dkv.shape[0],), math.sqrt(eps) / scale, dtype=torch.float64),
        "attn_k_b.weight": w.w_uk.transpose(1, 2),
        "attn_v_b.weight": w.w_uv,
        "attn_output.weight": w.w_o.flatten(1),
    }


def latent_scale(mean_square: float, eps: float) -> float:
    """Return the largest power of two s with mean((s·c)²) ≤ 2·eps·2^-16, where mean(c²) ≤ `mean_square`."""
    limit = math.sqrt(2 * eps * _DEPARTURE / mean_square) if mean_square > 0 else 1.0
    return 2.0 ** math.floor(math.log2(limit))


def input_scale(input_norm: Float[Tensor, " D"]) -> float:
    """Return the power of two that takes what a norm with these weights gives nearest to the size wanted."""
    size = float(input_norm.square().mean().sqrt())
    return 2.0 ** round(math.log2(_INPUT_SIZE / size)) if size > 0 else 1.0
