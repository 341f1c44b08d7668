"""What the model is given as its cache for one forward pass over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from mla_kernels.decode import mla_decode

if TYPE_CHECKING:
    from mla_convert.decode.paged import PagedLatentCache


class GatheredSequence(Cache):
    """One sequence as transformers' caches show it: ``update`` stores the new rows and returns all of them.

    Args:
        slots: where the new rows go.
        pages: the sequence's pages, those of the new rows included.
        length: how many rows it had before.
    """

    def __init__(self, pool: PagedLatentCache, slots: Tensor, pages: Sequence[int], length: int) -> None:
        layers = range(len(pool.layers))
        super().__init__(layers=[_GatheredLayer(pool, i, slots, pages, length) for i in layers])


class _GatheredLayer(DynamicLayer):
    def __init__(self, pool: PagedLatentCache, layer: int, slots: Tensor, pages: Sequence[int], length: int) -> None:
        super().__init__()
        self._pool, self._layer, self._slots, self._pages, self._length = pool, layer, slots, pages, length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store c_kv [1 1 S C] and k_rope [1 1 S R]; return those of the whole sequence."""
        self._pool.write(self._layer, self._slots, key_states[0, 0], value_states[0, 0])
        start, self._length = self._length, self._length + key_states.shape[2]
        if not start and not self._pool.fp8:
            return key_states, value_states
        c_kv, k_rope = self._pool.gather(self._layer, self._pages, self._length)
        return c_kv[None, None], k_rope[None, None]

    def get_seq_length(self) -> int:
        """How many rows are stored."""
        return self._length


class AttendingStep:
    """S more tokens of B sequences, attended to where they lie: see ``attention_mla.MLAAttention``.

    Attributes:
        block_table: int32 [B, the longest sequence's pages].
        cache_seqlens: int32 [B], the new tokens included.
    """

    def __init__(self, pool: PagedLatentCache, slots: Tensor, block_table: Tensor, cache_seqlens: Tensor) -> None:
        self._pool, self._slots = pool, slots
        self.block_table, self.cache_seqlens = block_table, cache_seqlens

    def attend_latent(
        self,
        layer_idx: int,
        query: Tensor,
        c_kv: Tensor,
        k_rope: Tensor,
        *,
        softmax_scale: float,
        window: int | None,
        backend: Literal["triton", "torch"],
    ) -> Tensor:
        """Store c_kv [B S C] and k_rope [B S R]; return the weighted latents [B S H C] of query [B S H C+R]."""
        pool, layout = self._pool, self._pool.rows[layer_idx]
        pool.write(layer_idx, self._slots, c_kv.flatten(0, 1), k_rope.flatten(0, 1))
        cached = pool.layers[layer_idx], self.block_table, self.cache_seqlens, layout.stored_rank, softmax_scale
        latents, _ = mla_decode(layout.padded(query), *cached, window=window, backend=backend)
        return latents[..., : layout.rank]
