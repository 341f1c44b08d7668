"""LayerNorms of queries and keys (Cohere, StableLM), as the RMSNorms that the conversion knows."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from mla_convert.sources.attention import AttentionWeights


def centred(weights: AttentionWeights, query_norm: Tensor, key_norm: Tensor) -> AttentionWeights:
    """Return the layer whose RMSNorm by heads answers as its LayerNorm by heads, without bias, does.

    A LayerNorm is an RMSNorm of what is left when the mean over a head is taken away. The projection is linear, so
    the mean is taken out of its rows and bias, in float32.

    Args:
        query_norm, key_norm: the weights of the LayerNorms, [H K] and [G K].
    """

    def without_mean(rows: Tensor) -> Tensor:
        return rows.float() - rows.float().mean(1, keepdim=True)

    return replace(
        weights,
        w_q=without_mean(weights.w_q),
        w_k=without_mean(weights.w_k),
        b_q=None if weights.b_q is None else without_mean(weights.b_q),
        b_k=None if weights.b_k is None else without_mean(weights.b_k),
        query_norm=query_norm,
        key_norm=key_norm,
    )
