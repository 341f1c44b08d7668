"""Absorption: the up-projections in the layout that decoding reads, merged with W_O where that is smaller.

A decoded token needs q_latent,h = W_UK,hᵀ q_nope,h before the cache is read, and W_O,h W_UV,h u_h after it
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2). Both are exact by associativity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Merge = Literal["auto", "never", "always"]


@dataclass(frozen=True)
class AbsorbedMatrices:
    """One layer's decode-ready matrices, contiguous; exactly one of ``w_uv_t`` and ``w_comb`` is there.

    Attributes:
        w_uk: [H N C]; q_latent[h] = q_nope[h] @ w_uk[h].
        w_uv_t: [H C V]; head output = u[h] @ w_uv_t[h], to which W_O still applies.
        w_comb: [H C D]; the layer's output = Σ_h u[h] @ w_comb[h]: W_O has been applied, its bias has not.
    """

    w_uk: Tensor
    w_uv_t: Tensor | None = None
    w_comb: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.w_uv_t is None) == (self.w_comb is None):
            raise ValueError("exactly one of w_uv_t and w_comb must be given")

    @property
    def merged(self) -> bool:
        """Whether W_UV and W_O have become one matrix."""
        return self.w_comb is not None


def merging_is_smaller(num_heads: int, kv_rank: int, value_dim: int, hidden_size: int) -> bool:
    """Return whether the merged H·C·D numbers are fewer than the H·C·V + D·H·V of W_UV and W_O kept apart."""
    separate = num_heads * kv_rank * value_dim + hidden_size * num_heads * value_dim
    return num_heads * kv_rank * hidden_size < separate


def absorb_layer(
    w_uk: Float[Tensor, "H N C"],
    w_uv: Float[Tensor, "H V C"],
    w_o: Float[Tensor, "D H V"],
    *,
    merge: Merge,
) -> AbsorbedMatrices:
    """Return the layer's decode-ready matrices, in the caller's dtype.

    ``merge`` "auto" merges W_UV and W_O where that is fewer numbers (`merging_is_smaller`). The product is computed in
    float64 and rounded once. A bias on the output projection is not part of it and stays to be added by the caller.
    """
    num_heads, value_dim, kv_rank = w_uv.shape
    merged = merge == "always" or (
        merge == "auto" and merging_is_smaller(num_heads, kv_rank, value_dim, hidden_size=w_o.shape[0])
    )
    w_uk = w_uk.clone(memory_format=torch.contiguous_format)
    if merged:
        w_comb_HCD = torch.einsum("dhv,hvc->hcd", w_o.to(torch.float64), w_uv.to(torch.float64))
        return AbsorbedMatrices(w_uk, w_comb=w_comb_HCD.to(w_uv.dtype).contiguous())
    return AbsorbedMatrices(w_uk, w_uv_t=w_uv.transpose(1, 2).clone(memory_format=torch.contiguous_format))


def project_latents(
    latents: Float[Tensor, "B S H C"],
    matrices: AbsorbedMatrices,
    w_o: Float[Tensor, "D H V"] | None = None,
) -> Float[Tensor, "B S D"]:
    """Return the attention layer's output, without W_O's bias, from each head's weighted sum of latents.

    Raises:
        ValueError: the matrices are not merged and ``w_o`` is not given.
    """
    if matrices.w_comb is not None:
        return torch.einsum("bshc,hcd->bsd", latents, matrices.w_comb)
    if matrices.w_uv_t is None or w_o is None:
        raise ValueError("matrices that are not merged need w_o")
    return torch.einsum("bshc,hcv,dhv->bsd", latents, matrices.w_uv_t, w_o)
