"""The attention weights of one source layer, in the layout the conversion works on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """One source layer's attention, its rotary dims in rotate-half order (pair l is dims l and l + K/2).

    H query heads and G KV heads of dim K; query head h reads KV head h // (H/G); V is the value dim, D the model width.

    Attributes:
        w_q: [H K D].
        w_k: [G K D].
        w_v: [G V D].
        w_o: [D H V].
        b_q: [H K] or None.
        b_k: [G K] or None.
        b_v: [G V] or None.
        b_o: [D] or None.
    """

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    b_q: Tensor | None
    b_k: Tensor | None
    b_v: Tensor | None
    b_o: Tensor | None
