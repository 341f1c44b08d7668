"""How a layer's cached rows are stored, in the model's dtype or packed in fp8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_kernels.fp8 import fp8_layout


@dataclass(frozen=True)
class RowLayout:
    """How a layer's rows [c_kv | k_rope] are stored.

    Attributes:
        rank: C.
        rope_dim: R.
        stored_rank: C and the zero channels that are stored after c_kv. Packed rows hold whole groups of 16 channels.
        stored_rope: R, or the zero channels that are stored for none. Packed rows hold a pair at least.
        width: numbers of a row, bytes of a packed one.
    """

    rank: int
    rope_dim: int
    stored_rank: int
    stored_rope: int
    width: int

    def padded(self, rows: Tensor) -> Tensor:
        """Return rows [... C+R] with the zero channels that are stored."""
        zeros, more = self.stored_rank - self.rank, self.stored_rope - self.rope_dim
        if not zeros and not more:
            return rows
        c_kv, k_rope = rows.split([self.rank, self.rope_dim], dim=-1)
        pad = torch.nn.functional.pad
        return torch.cat((pad(c_kv, (0, zeros)), pad(k_rope, (0, more))), dim=-1)


def row_layout(rank: int, rope_dim: int, *, fp8: bool) -> RowLayout:
    """Return how rows of those sizes are stored, in the model's dtype or packed."""
    if not fp8:
        return RowLayout(rank, rope_dim, rank, rope_dim, rank + rope_dim)
    stored_rank, stored_rope = rank + -rank % 16, rope_dim or 2
    return RowLayout(rank, rope_dim, stored_rank, stored_rope, fp8_layout(stored_rank, stored_rope).row_bytes)
