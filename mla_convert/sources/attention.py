"""The attention weights of one source layer, in the layout the conversion works on."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """One source layer's attention, its rotary dims in rotate-half order (pair l is dims l and l + K/2).

    H query heads and G KV heads of dim K; query head h reads KV head h // (H/G); V is the value dim, D the model width.
    """

    w_q: Float[Tensor, "H K D"]
    w_k: Float[Tensor, "G K D"]
    w_v: Float[Tensor, "G V D"]
    w_o: Float[Tensor, "D H V"]
    b_q: Float[Tensor, "H K"] | None
    b_k: Float[Tensor, "G K"] | None
    b_v: Float[Tensor, "G V"] | None
    b_o: Float[Tensor, " D"] | None
