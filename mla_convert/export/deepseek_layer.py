"""One layer in the form of transformers' stock DeepSeek-V3 attention: the norm on the latent made linear, biases moved.

Stock attention has what a converted layer does not: an RMSNorm on the latent (and on a query latent, where there is
one), a softmax scale of (N + R)^-1/2, interleaved RoPE rows, and biases only on the first projections and the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mla_convert.mla import MLAWeights

LATENT_EPS = 1e-6
"""The eps of ``kv_a_layernorm`` and ``q_a_layernorm`` in transformers, whatever the config says."""

LARGEST_SCALE = 2.0**-20

# Half of mean(x^2)/eps is the norm's relative departure from a constant factor; a float32 has 24 bits.
_DEPARTURE = 2.0**-20


@dataclass(frozen=True)
class LinearNorm:
    """An RMSNorm made linear: rows before it times `scale`, every weight `weight`, columns after it times `gain`.

    norm(s·c) = s·c·w / sqrt(mean((s·c)²) + eps), which is c / gain as long as eps dwarfs mean((s·c)²). `weight` is a
    power of two near sqrt(eps)/s, so that the norm's output, which is what is cached, has nearly its natural size.
    """

    scale: float
    weight: float
    gain: float


def linear_norm(mean_square: float) -> LinearNorm:
    """Return the factors for latents whose mean square is at most `mean_square`.

    The scale is 2^-20, or the largest smaller power of two at which the norm departs from a constant factor by at most
    2^-20.
    """
    scale = LARGEST_SCALE
    while mean_square * scale**2 > 2 * LATENT_EPS * _DEPARTURE:
        scale /= 2
    weight = 2.0 ** round(math.log2(math.sqrt(LATENT_EPS) / scale))
    return LinearNorm(scale=scale, weight=weight, gain=math.sqrt(LATENT_EPS) / (scale * weight))


def deepseek_layer(
    weights: MLAWeights,
    input_norm: Float[Tensor, " D"],
    *,
    nope_factor: float,
    rope_factor: float,
    output_factor: float = 1.0,
) -> dict[str, Tensor]:
    """Return the layer's tensors under DeepSeek's names (below ``self_attn.``), in float64.

    Biases, exactly:

    - of the latent: towards content keys it adds the same to every score of a query, which the softmax ignores; towards
      values it adds a constant to the attention output, since the attention weights sum to one: ``o_proj.bias``;
    - of the RoPE key: the last R entries of ``kv_a_proj_with_mqa.bias``;
    - of queries: stock ``q_proj`` has none, so the query is written as ``q_b_proj(norm(q_a_proj(x)))`` with
      q_a_proj(x) = s·[x; 1] from an identity and a bias, the norm made linear, and q_b_proj = [W_Q, b_q].

    Args:
        input_norm: the weight of the RMSNorm before the attention; it bounds the latent: ‖x / input_norm‖² ≤ D.
        nope_factor: content scores are to be multiplied by it.
        rope_factor: RoPE scores likewise.
        output_factor: the attention's output likewise.
    """
    w = weights.to(torch.float64)
    norm = linear_norm(latent_mean_square(w.w_dkv, input_norm.to(torch.float64)))
    order = interleaved(w.w_kr.shape[0])
    w_q = torch.cat((w.w_uq * nope_factor, w.w_qr[:, order] * rope_factor), dim=1).flatten(0, 1)
    tensors = {
        "kv_a_proj_with_mqa.weight": torch.cat((w.w_dkv * norm.scale, w.w_kr[order])),
        "kv_a_layernorm.weight": torch.full((w.w_dkv.shape[0],), norm.weight, dtype=torch.float64),
        "kv_b_proj.weight": torch.cat((w.w_uk, w.w_uv), dim=1).flatten(0, 1) * norm.gain,
        "o_proj.weight": w.w_o.flatten(1) * output_factor,
    }
    biases = (w.b_dkv, w.b_kr, w.b_uq, w.b_qr, w.b_o)
    if all(bias is None for bias in biases):
        return {"q_proj.weight": w_q, **tensors}

    latent, rope, _, _, output = biases
    key_bias = torch.zeros(w.w_dkv.shape[0] + w.w_kr.shape[0], dtype=torch.float64)
    if rope is not None:
        key_bias[w.w_dkv.shape[0] :] = rope[order]
    output_bias = torch.zeros(w.w_o.shape[0], dtype=torch.float64) if output is None else output
    if latent is not None:
        output_bias = output_bias + torch.einsum("dhv,hvc,c->d", w.w_o, w.w_uv, latent)
    tensors |= {"kv_a_proj_with_mqa.bias": key_bias, "o_proj.bias": output_bias * output_factor}
    if w.b_uq is None or w.b_qr is None:
        return {"q_proj.weight": w_q, **tensors}
    b_q = torch.cat((w.b_uq * nope_factor, w.b_qr[:, order] * rope_factor), dim=1).flatten()
    return {**_biased_query(w_q, b_q, input_norm.to(torch.float64)), **tensors}


def interleaved(rope_dim: int) -> Tensor:
    """Return the order [R] that takes rows from rotate-half order to interleaved pairs: re 0, im 0, re 1, im 1, ..."""
    return torch.arange(rope_dim).view(2, -1).T.flatten()


def latent_mean_square(w_dkv: Float[Tensor, "C D"], input_norm: Float[Tensor, " D"]) -> float:
    """Return the largest mean square that w_dkv x can have: ‖w_dkv diag(input_norm)‖₂²·D/C."""
    rank, width = w_dkv.shape
    scaled = w_dkv * input_norm
    gram = scaled @ scaled.T if rank <= width else scaled.T @ scaled
    return float(torch.linalg.eigvalsh(gram)[-1]) * width / rank


def _biased_query(
    w_q: Float[Tensor, "J D"], b_q: Float[Tensor, " J"], input_norm: Float[Tensor, " D"]
) -> dict[str, Tensor]:
    """Return w_q x + b_q as the three tensors and one bias of a query latent [x; 1] of rank D + 1."""
    width = w_q.shape[1]
    norm = linear_norm((float(input_norm.abs().max()) ** 2 * width + 1) / (width + 1))
    identity = torch.eye(width + 1, dtype=torch.float64) * norm.scale
    return {
        "q_a_proj.weight": identity[:, :width].contiguous(),
        "q_a_proj.bias": identity[:, width].contiguous(),
        "q_a_layernorm.weight": torch.full((width + 1,), norm.weight, dtype=torch.float64),
        "q_b_proj.weight": torch.cat((w_q, b_q[:, None]), dim=1) * norm.gain,
    }
