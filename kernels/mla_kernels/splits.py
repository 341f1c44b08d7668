"""Into how many splits the cache is divided: decided on the host, from shapes alone.

Nothing here reads a length, so there is no synchronisation, and a captured CUDA graph stays right when lengths change:
the kernel divides each sequence by its own length.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

MAX_SPLITS = 512
# What a block spends before its first and after its last tile (the query, filling the pipeline, the result), in tiles.
_BLOCK_OVERHEAD = 4


@lru_cache(maxsize=4096)
def choose_splits(
    row_blocks: int, rows: int, batch: int, capacity: int, block_n: int, rank: int, token_bytes: int, slots: int
) -> int:
    """Return the number of splits with the least estimated time for the longest sequence that the cache can hold.

    The estimate, in tile times: waves of blocks over ``slots`` (multiprocessors x blocks on each) times the tiles of a
    split and a block's overhead, plus writing and reading the float32 partial results, which all blocks share.

    Args:
        row_blocks, rows: blocks of query rows, and query rows, of one sequence.
        batch: sequences.
        capacity: tokens that a sequence's cache can hold.
        block_n: tokens of a tile.
        rank: channels of the latent, those of a result row.
        token_bytes: bytes of a cached token.
        slots: blocks that run at a time on the whole device.
    """
    tiles = ceil(capacity / block_n)
    if tiles <= 1:
        return 1
    partial_tiles = 2 * 4 * rank * batch * rows / (block_n * token_bytes * slots)

    def time(splits: int) -> float:
        waves = ceil(row_blocks * batch * splits / slots)
        combine = splits * partial_tiles + _BLOCK_OVERHEAD if splits > 1 else 0.0
        return waves * (ceil(tiles / splits) + _BLOCK_OVERHEAD) + combine

    return min(range(1, min(tiles, MAX_SPLITS, 4 * slots) + 1), key=time)
