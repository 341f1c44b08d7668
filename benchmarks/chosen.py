"""What the launch chooses for a call: its tile and its number of splits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mla_kernels.backends import describe
from mla_kernels.checks import check_inputs
from mla_kernels.splits import choose_splits
from mla_kernels.tiles import blocks_per_multiprocessor, choose_tile, shared_memory


def chosen_launch(q: Tensor, cache: Tensor, table: Tensor | None, lengths: Tensor, rank: int) -> dict[str, Any]:
    """Return the tile, the blocks on a multiprocessor and the splits, which depend on shapes and device alone."""
    inputs = check_inputs(q, cache, table, lengths, rank)
    device, multiprocessors = describe(q.device)
    rows, rope_dim = q.shape[1] * q.shape[2], q.shape[3] - rank
    fp8 = inputs.scales is not None
    tile = choose_tile(device, rows, rank, rope_dim, itemsize=q.itemsize, fp8=fp8)
    shared = shared_memory(device, tile, rank, rope_dim, itemsize=q.itemsize, fp8=fp8)
    blocks = blocks_per_multiprocessor(device, tile, shared)
    splits = choose_splits(
        -(-rows // tile.block_m),
        rows,
        q.shape[0],
        inputs.capacity,
        tile.block_n,
        rank,
        inputs.token_bytes,
        multiprocessors * blocks,
    )
    return {
        "tile": [tile.block_m, tile.block_n, tile.num_warps, tile.num_stages],
        "blocks_per_multiprocessor": blocks,
        "num_splits": splits,
    }
