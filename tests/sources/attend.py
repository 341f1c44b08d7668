"""Attention from its definition, in float64, of the weights and the description that an adapter gives."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.sources import AttentionWeights
from mla_convert.spec import RopeSpec, SourceSpec


def attend(weights: AttentionWeights, hidden: Tensor, spec: SourceSpec, layer: int) -> Tensor:
    """What the attention of ``layer`` adds, [B S D], one head at a time; ``hidden`` is what it reads, [B S D]."""
    length, rope = hidden.shape[1], spec.rope_of(layer)
    turn = _turn(rope, length)
    queries = _normalised(_projected(hidden, weights.w_q, weights.b_q), weights.query_norm, spec)
    keys = _normalised(_projected(hidden, weights.w_k, weights.b_k), weights.key_norm, spec)
    values = _projected(hidden, weights.w_v, weights.b_v)
    mask = _mask(length, spec.windows[layer])
    result = torch.zeros_like(hidden)
    for head in range(spec.num_heads):
        group = head * spec.num_kv_heads // spec.num_heads
        scores = _rotated(queries[head], turn) @ _rotated(keys[group], turn).mT * spec.attention_scale
        if spec.attention_softcap is not None:
            scores = spec.attention_softcap * torch.tanh(scores / spec.attention_softcap)
        if spec.alibi_slopes is not None:
            position = torch.arange(length, dtype=torch.float64)
            bias = spec.alibi_slopes[head] * (position - position[:, None])
            if spec.alibi_rounded:
                bias = torch.tensor(spec.alibi_slopes[head]).bfloat16() * position.bfloat16()
            scores = scores + bias
        result += torch.softmax(scores + mask, dim=-1) @ values[group] @ weights.w_o[:, head].double().T
    return result if weights.b_o is None else result + weights.b_o.double()


def _projected(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Heads first, [H B S K]."""
    heads = [hidden @ rows.double().T for rows in weight]
    if bias is not None:
        heads = [head + row.double() for head, row in zip(heads, bias, strict=True)]
    return torch.stack(heads)


def _normalised(heads: Tensor, weight: Tensor | None, spec: SourceSpec) -> Tensor:
    """Divided by the root mean square of each head's dims, or of all heads' together, and weighted."""
    if weight is None or spec.qk_norm is None:
        return heads
    over = (-1,) if spec.qk_norm.scope == "head" else (0, -1)
    size = heads.square().mean(over, keepdim=True) + spec.qk_norm.eps
    return heads / size.sqrt() * weight.double()[:, None, None]


def _turn(rope: RopeSpec, length: int) -> Tensor:
    """What position s multiplies pair l by, as a complex number, [S K/2], in a text of ``length`` tokens."""
    frequencies = torch.tensor(frequencies_at(rope, length), dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.polar(torch.tensor(rope.factors, dtype=torch.float64).expand_as(angles).contiguous(), angles)


def frequencies_at(rope: RopeSpec, length: int) -> list[float]:
    """The K/2 frequencies in a text of ``length`` tokens."""
    update = rope.update
    if update is None or length <= update.original_positions:
        return list(rope.inv_freq)
    rest = [0.0] * (len(rope.inv_freq) - rope.dim // 2)
    if update.kind == "longrope":
        return [*update.inv_freq, *rest]
    growth = update.factor * length / update.original_positions - update.factor + 1
    theta = update.theta * growth ** (rope.dim / (rope.dim - 2))
    return [*(theta ** (-2 * pair / rope.dim) for pair in range(rope.dim // 2)), *rest]


def _rotated(heads: Tensor, turn: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    turned = torch.complex(heads[..., :half].contiguous(), heads[..., half:].contiguous()) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def _mask(length: int, window: int | None) -> Tensor:
    """0 where query row s may see key column t, minus infinity elsewhere."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return torch.zeros(length, length, dtype=torch.float64).masked_fill(~seen, -torch.inf)
