"""Weights of one size: what a converted layer leaves open, chosen so that one learning rate fits all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Each sweep balances one factor against the next; what a sweep leaves is below the rounding to powers of two.
_SWEEPS = 4


@torch.no_grad()
def balance(model: Any) -> None:
    """Scale the factors of every layer's attention, in place, until both sides of each product are of one size.

    A closed-form conversion leaves W_DKV a hundredth of W_UK and W_UV, and W_KR a ten-thousandth of W_QR: an Adam step,
    the same for every weight, would shatter the one and not move the other. Latent channel c may be multiplied by any
    number if W_UK and W_UV are divided by it; so may a slot of k_rope against W_QR, a content dim of a head's query
    against W_UK, and a value dim of a head against W_O. Both sides get the same root mean square, as nearly as powers
    of two can: what the model computes does not change by a bit, short of under- and overflow.

    Args:
        model: a native model (`mla_convert.mla`), unsharded.
    """
    for layer in model.model.layers:
        for _ in range(_SWEEPS):
            for first, second in _products(layer.self_attn):
                scale = _scale(first, second)
                for part in first:
                    part.mul_(scale.view(-1, *[1] * (part.dim() - 1)))
                for part in second:
                    part.div_(scale.view(-1, *[1] * (part.dim() - 1)))


def _products(attention: Any) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The two sides of each product as views, the channel that they share first: weights, then a bias if there is."""
    heads, rank = attention.num_heads, attention.kv_lora_rank
    nope, rope, value = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim
    down, up = _sides(attention.kv_a_proj_with_mqa), attention.kv_b_proj.weight
    projection = attention.q_proj if hasattr(attention, "q_proj") else attention.q_b_proj
    query = [part.unflatten(0, (heads, nope + rope)) for part in _sides(projection)]
    up_HJC = up.view(heads, nope + value, rank)

    yield [part[:rank] for part in down], [up.t()]
    # A slot is two dims, one rotation apart: dims j and j + R/2 of the key and of every head's query.
    if rope:
        yield (
            [part[rank:].unflatten(0, (2, rope // 2)).transpose(0, 1) for part in down],
            [part[:, nope:].unflatten(1, (2, rope // 2)).movedim(2, 0) for part in query],
        )
    for head in range(heads):
        yield [part[head, :nope] for part in query], [up_HJC[head, :nope]]
        output = attention.o_proj.weight[:, head * value : (head + 1) * value]
        yield [up_HJC[head, nope:]], [output.t()]


def _sides(projection: Any) -> list[Tensor]:
    return [projection.weight] if projection.bias is None else [projection.weight, projection.bias]


def _scale(first: list[Tensor], second: list[Tensor]) -> Tensor:
    """Return the powers of two, one a channel, that the first side is multiplied and the second divided by; 1 for 0."""
    sizes = [side[0].flatten(1).square().mean(dim=1).sqrt() for side in (first, second)]
    exponent = (0.5 * (sizes[1].log2() - sizes[0].log2())).round()
    return torch.where(exponent.isfinite(), exponent, 0.0).exp2()
