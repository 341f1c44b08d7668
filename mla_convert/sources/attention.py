"""The attention weights of one source layer, in the layout the conversion works on."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mla_convert.spec import RopeSpec


@dataclass(frozen=True)
class AttentionWeights:
    """One source layer's attention, its dims in rotate-half order (pair l is dims l and l + K/2).

    H query heads and G KV heads of dim K; query head h reads KV head h // (H/G); V is the value dim, D the model width.

    Attributes:
        query_norm, key_norm: the weights of the norms of queries and keys, where the source has them: what is scored is
            (W x + b) divided by its root mean square, times the weight.
        norm_scope: what the root mean square is over: see :class:`~mla_convert.spec.QKNormSpec`.
    """

    w_q: Float[Tensor, "H K D"]
    w_k: Float[Tensor, "G K D"]
    w_v: Float[Tensor, "G V D"]
    w_o: Float[Tensor, "D H V"]
    b_q: Float[Tensor, "H K"] | None
    b_k: Float[Tensor, "G K"] | None
    b_v: Float[Tensor, "G V"] | None
    b_o: Float[Tensor, " D"] | None
    query_norm: Float[Tensor, "H K"] | None = None
    key_norm: Float[Tensor, "G K"] | None = None
    norm_scope: Literal["head", "all"] = "head"

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> AttentionWeights:
        """The same layer with every tensor in `dtype` on `device`."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "norm_scope"}
        return replace(self, **{name: t.to(device, dtype) for name, t in tensors.items() if t is not None})


def key_sizes(weights: AttentionWeights) -> Float[Tensor, " G"]:
    """What brings each head's keys before their norm to about the size that they have after it, float64."""
    energy = weights.w_k.double().square().sum((1, 2))
    return torch.where(energy > 0, (weights.w_k.shape[1] / energy).sqrt(), torch.ones_like(energy))


def rotate_half_order(weights: AttentionWeights, rope: RopeSpec) -> AttentionWeights:
    """Return the layer with query and key dims moved from the source's order into rotate-half order."""
    order = source_order(rope)
    if torch.equal(order, torch.arange(len(order))):
        return weights

    def moved(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows[:, order]

    return replace(
        weights,
        w_q=weights.w_q[:, order],
        w_k=weights.w_k[:, order],
        b_q=moved(weights.b_q),
        b_k=moved(weights.b_k),
        query_norm=moved(weights.query_norm),
        key_norm=moved(weights.key_norm),
    )


def source_order(rope: RopeSpec) -> torch.Tensor:
    """Return which source dim of a head stands at each place of rotate-half order, [K].

    In the source the rotary dims come first, in rotate-half order of their own or with the two dims of a pair side by
    side; the rest do not turn, and are paired as they come.
    """
    turning, dim = rope.dim // 2, 2 * len(rope.inv_freq)
    rest = dim // 2 - turning
    if rope.interleaved:
        first, second = torch.arange(0, rope.dim, 2), torch.arange(1, rope.dim, 2)
    else:
        first, second = torch.arange(turning), torch.arange(turning, rope.dim)
    others = torch.arange(rope.dim, dim)
    return torch.cat((first, others[:rest], second, others[rest:]))
