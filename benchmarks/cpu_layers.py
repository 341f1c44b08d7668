"""One attention layer's decode step in three forms, on caches that are allocated beforehand and already full.

Each step is whole: the new token's row is projected, rotated and written in place at the end of the cache, all tokens
are attended to, and the output is projected. ``core`` is the attention alone, from the per-head query to the per-head
output, on the same cache. Batch 1, one new token. Random weights: nothing is skipped for being zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.shapes import LayerShape
from mla_kernels.eager import eager_decode


def _weight(rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)


def _angles(position: int, dims: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, dims, 2).float() / dims)
    angles = position * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    real, imaginary = x.chunk(2, dim=-1)
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)


class LatentLayer:
    """The converted layer, absorbed or expanding. Its cache is one tensor [1, T, C + R]."""

    def __init__(self, shape: LayerShape, tokens: int, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.tokens = shape, tokens
        heads, rank = shape.heads, shape.rank
        query = shape.nope_dim + shape.rope_dim
        self.scale = shape.head_dim**-0.5
        self.w_q = _weight(heads * query, shape.hidden, generator, dtype)
        self.w_kv_a = _weight(shape.latent_numbers, shape.hidden, generator, dtype)
        self.w_kv_b = _weight(heads * (shape.nope_dim + shape.value_dim), rank, generator, dtype)
        w_HJC = self.w_kv_b.view(heads, -1, rank)
        w_uk, w_uv = w_HJC.split([shape.nope_dim, shape.value_dim], dim=1)
        self.w_uk, self.w_uv_t = w_uk.contiguous(), w_uv.transpose(1, 2).contiguous()
        self.w_o = _weight(shape.hidden, heads * shape.value_dim, generator, dtype)
        self.cos, self.sin = _angles(tokens - 1, shape.rope_dim, dtype)
        self.cache = torch.randn(1, tokens, shape.latent_numbers, generator=generator).to(dtype)
        self.lengths = torch.tensor([tokens], dtype=torch.int32)
        self.x = torch.randn(1, shape.hidden, generator=generator).to(dtype)

    def absorbed(self) -> Tensor:
        """Return the step's output [1, D], attending to the latent directly."""
        q_nope, q_rope = self._append()
        u_HC = self._attend_latent(self._absorb(q_nope, q_rope))
        return linear(torch.bmm(u_HC[:, None], self.w_uv_t).view(1, -1), self.w_o)

    def expanding(self) -> Tensor:
        """Return the step's output [1, D], rebuilding every head's keys and values from the latent."""
        return linear(self._attend_expanded(*self._append()).reshape(1, -1), self.w_o)

    def absorbed_core(self) -> Callable[[], Tensor]:
        """Return a call from the absorbed query to each head's weighted latent [H, C]."""
        query = self._absorb(*self._append())
        return lambda: self._attend_latent(query)

    def expanding_core(self) -> Callable[[], Tensor]:
        """Return a call that rebuilds keys and values and attends: each head's output [1, H, 1, V]."""
        q_nope, q_rope = self._append()
        return lambda: self._attend_expanded(q_nope, q_rope)

    def _append(self) -> tuple[Tensor, Tensor]:
        """Write the new token's row; return q_nope [H, N] and the rotated q_rope [H, R]."""
        shape = self.shape
        query = linear(self.x, self.w_q).view(shape.heads, -1)
        q_nope, q_rope = query.split([shape.nope_dim, shape.rope_dim], dim=-1)
        row = linear(self.x, self.w_kv_a)[0]
        last = self.cache[0, self.tokens - 1]
        last[: shape.rank] = row[: shape.rank]
        last[shape.rank :] = _rotate(row[shape.rank :], self.cos, self.sin)
        return q_nope, _rotate(q_rope, self.cos, self.sin)

    def _absorb(self, q_nope: Tensor, q_rope: Tensor) -> Tensor:
        q_latent = torch.bmm(q_nope[:, None], self.w_uk)[:, 0]
        return torch.cat((q_latent, q_rope), dim=-1)[None, None]

    def _attend_latent(self, query: Tensor) -> Tensor:
        out, _ = eager_decode(query, self.cache, None, self.lengths, self.shape.rank, self.scale)
        return out[0, 0]

    def _attend_expanded(self, q_nope: Tensor, q_rope: Tensor) -> Tensor:
        shape = self.shape
        c_kv, k_rope = self.cache[0].split([shape.rank, shape.rope_dim], dim=-1)
        expanded = linear(c_kv, self.w_kv_b).view(self.tokens, shape.heads, -1).transpose(0, 1)
        k_nope, value = expanded.split([shape.nope_dim, shape.value_dim], dim=-1)
        key = torch.cat((k_nope, k_rope.expand(shape.heads, -1, -1)), dim=-1)
        query = torch.cat((q_nope, q_rope), dim=-1)[None, :, None]
        return scaled_dot_product_attention(query, key[None], value[None], scale=self.scale)


class SourceLayer:
    """The grouped-query layer that was converted. Its cache is K and V, [1, G, T, K] each."""

    def __init__(self, shape: LayerShape, tokens: int, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.tokens = shape, tokens
        width = shape.kv_heads * shape.head_dim
        self.w_q = _weight(shape.heads * shape.head_dim, shape.hidden, generator, dtype)
        self.w_k, self.w_v = (_weight(width, shape.hidden, generator, dtype) for _ in range(2))
        self.w_o = _weight(shape.hidden, shape.heads * shape.head_dim, generator, dtype)
        self.cos, self.sin = _angles(tokens - 1, shape.head_dim, dtype)
        rows = (1, shape.kv_heads, tokens, shape.head_dim)
        self.keys, self.values = (torch.randn(rows, generator=generator).to(dtype) for _ in range(2))
        self.x = torch.randn(1, shape.hidden, generator=generator).to(dtype)

    def step(self, form: str) -> Tensor:
        """Return the step's output [1, D], attending in the named form of :data:`SOURCE_FORMS`."""
        return linear(SOURCE_FORMS[form](self._append(), self.keys, self.values).reshape(1, -1), self.w_o)

    def core(self, form: str) -> Callable[[], Tensor]:
        """Return a call that attends: each head's output, [1, H, 1, K] or the same numbers in another shape."""
        query, attend = self._append(), SOURCE_FORMS[form]
        return lambda: attend(query, self.keys, self.values)

    def _append(self) -> Tensor:
        """Write the new token's key and value; return the rotated query [1, H, 1, K]."""
        shape = self.shape
        query = linear(self.x, self.w_q).view(1, shape.heads, 1, shape.head_dim)
        key = linear(self.x, self.w_k).view(shape.kv_heads, shape.head_dim)
        self.keys[0, :, self.tokens - 1] = _rotate(key, self.cos, self.sin)
        self.values[0, :, self.tokens - 1] = linear(self.x, self.w_v).view(shape.kv_heads, shape.head_dim)
        return _rotate(query, self.cos, self.sin)


def sdpa_enable_gqa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """SDPA's own grouping, which transformers uses where it can."""
    return scaled_dot_product_attention(query, key, value, enable_gqa=True)


def sdpa_repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """SDPA on keys and values repeated for every query head, transformers' other form."""
    repeats = query.shape[1] // key.shape[1]
    return scaled_dot_product_attention(query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))


def sdpa_grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """SDPA with a group's query heads as its query rows: right for one new token, and nothing is repeated."""
    return scaled_dot_product_attention(_grouped(query, key), key, value)


def matmul_grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Two products and a softmax over a group's query heads as rows, scores [G, H/G, T]."""
    scores = torch.matmul(_grouped(query, key)[0], key[0].transpose(1, 2)).mul_(key.shape[-1] ** -0.5)
    return torch.matmul(torch.softmax(scores, dim=-1), value[0])


def matmul_grouped_keys_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same with the keys as rows, scores [G, T, H/G], which some BLAS libraries do faster."""
    scores = torch.matmul(key[0], _grouped(query, key)[0].transpose(1, 2)).mul_(key.shape[-1] ** -0.5)
    return torch.matmul(torch.softmax(scores, dim=1).transpose(1, 2), value[0])


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    return query.view(1, key.shape[1], -1, query.shape[-1])


SOURCE_FORMS: dict[str, Any] = {
    "sdpa enable_gqa": sdpa_enable_gqa,
    "sdpa repeat_interleave": sdpa_repeated,
    "sdpa grouped rows": sdpa_grouped,
    "matmul grouped": matmul_grouped,
    "matmul keys first": matmul_grouped_keys_first,
}
