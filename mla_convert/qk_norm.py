"""Norms of queries and keys (Qwen3, Gemma 3, OLMo 2, ...) on both sides of the conversion, which keeps them exactly.

A normalised key is linear in the layer's input but for one factor, 1/rms, which depends on the token and the norm
alone. A score of the source is thus that factor times a score of linear keys, of whatever components these are mixed
and truncated: the linear keys are converted, and the cache holds the factor beside them, one number for each norm.
Queries are not cached; they are normalised as in the source and mixed after it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mla_convert.mla.weights import MLAWeights
from mla_convert.sources.attention import AttentionWeights, key_sizes


def without_norms(source: AttentionWeights) -> AttentionWeights:
    """Return the linear layer that scores as the source does, but for the factor 1/rms of each key.

    Queries become the norm's output, so that w_q [H K K] holds the norm's weights only. Each head's keys are brought to
    the size that they have after the norm, and queries take it back. A layer without norms is returned as it is.
    """
    if source.key_norm is None or source.query_norm is None:
        return source
    heads, groups = source.w_q.shape[0], source.w_k.shape[0]
    size = key_sizes(source)
    weight = size[:, None] * source.key_norm.double()
    query = source.query_norm.double() / size.repeat_interleave(heads // groups)[:, None]
    return replace(
        source,
        w_q=torch.diag_embed(query),
        b_q=None,
        w_k=weight[..., None] * source.w_k.double(),
        b_k=None if source.b_k is None else weight * source.b_k.double(),
        query_norm=None,
        key_norm=None,
    )


def with_norms(weights: MLAWeights, source: AttentionWeights) -> MLAWeights:
    """Add what the norms are taken of: the source's own queries and keys, a block of rows for each norm.

    A layer without norms is returned as it is.
    """
    if source.key_norm is None:
        return weights
    heads, groups = source.w_q.shape[0], source.w_k.shape[0]
    queries, keys = (1, 1) if source.norm_scope == "all" else (heads, groups)
    return replace(
        weights,
        w_qa=source.w_q.double().reshape(queries, -1, source.w_q.shape[2]),
        b_qa=None if source.b_q is None else source.b_q.double().reshape(queries, -1),
        w_kn=source.w_k.double().reshape(keys, -1, source.w_k.shape[2]),
        b_kn=None if source.b_k is None else source.b_k.double().reshape(keys, -1),
    )
