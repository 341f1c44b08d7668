"""Which tile the decode kernel runs with on which device, and what it costs there: arithmetic, no torch, no triton.

A tile is BLOCK_M query rows (s_q x H, flattened) by BLOCK_N cached tokens. The table is static: nothing is tuned while
a model is served, and the tests compile every entry ahead of time and hold its resources to what is stated here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from mla_kernels.errors import UnsupportedDeviceError, UnsupportedShapeError

MIN_RANK = 16
MAX_RANK = 1024
MIN_ROPE_DIM = 8
MAX_ROPE_DIM = 128
MIN_PAGE = 16
# tl.dot multiplies along at least 16 channels.
MIN_CHUNK = 16
MAX_CHUNKS = 4
# Channels that share a scale in the fp8 cache; its chunks are not wider.
FP8_BLOCK = 128


@dataclass(frozen=True)
class Tile:
    """BLOCK_M, BLOCK_N, warps and software-pipeline stages of one compilation."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Device:
    """What the choice of a tile depends on.

    Attributes:
        arch: compute capability (80, 86, 89, 90, 100, 120) or the name of an AMD architecture.
        shared_bytes: shared memory that one block may use.
        shared_bytes_per_sm: shared memory that the blocks of one multiprocessor share.
    """

    arch: int | str
    shared_bytes: int
    shared_bytes_per_sm: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; CDNA3: 64 KiB of LDS.
DEVICES: dict[int | str, Device] = {
    80: Device(80, 166912, 167936),
    86: Device(86, 101376, 102400),
    87: Device(87, 166912, 167936),
    89: Device(89, 101376, 102400),
    90: Device(90, 232448, 233472),
    100: Device(100, 232448, 233472),
    103: Device(103, 232448, 233472),
    120: Device(120, 101376, 102400),
    121: Device(121, 101376, 102400),
    "gfx942": Device("gfx942", 65536, 65536),
}
# Devices that take another's rows of the table.
_TABLE_OF: dict[int | str, int] = {87: 80, 103: 100, 121: 120}

# Upper bounds of the latent ranks that share a tile.
RANK_CLASSES = (128, 256, 512, 1024)
# Upper bounds of the query rows that share a tile; more rows take the last column.
ROW_CLASSES = (16, 32)


def _row(up_to_16: Tile, up_to_32: Tile, more: Tile) -> tuple[Tile, Tile, Tile]:
    return up_to_16, up_to_32, more


_WIDE = {
    128: _row(Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 64, 8, 2)),
    256: _row(Tile(16, 64, 4, 2), Tile(32, 64, 8, 2), Tile(64, 64, 8, 2)),
    1024: _row(Tile(16, 32, 8, 2), Tile(16, 32, 8, 2), Tile(16, 32, 8, 2)),
}
_NARROW = {
    128: _WIDE[128],
    256: _row(Tile(16, 64, 4, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
    1024: _row(Tile(16, 16, 8, 2), Tile(16, 16, 8, 2), Tile(16, 16, 8, 2)),
}
# Per device and rank class, the tiles of a 16-bit cache for up to 16, up to 32, and more query rows.
TABLE: dict[int | str, dict[int, tuple[Tile, Tile, Tile]]] = {
    80: {**_WIDE, 512: _row(Tile(16, 32, 4, 3), Tile(32, 32, 4, 3), Tile(64, 32, 8, 2))},
    86: {**_NARROW, 512: _row(Tile(16, 32, 4, 3), Tile(32, 32, 4, 2), Tile(64, 16, 8, 2))},
    89: {**_NARROW, 512: _row(Tile(16, 32, 4, 3), Tile(32, 32, 4, 2), Tile(64, 16, 8, 2))},
    90: {**_WIDE, 512: _row(Tile(16, 32, 4, 3), Tile(32, 64, 8, 2), Tile(64, 32, 8, 3))},
    100: {
        **_WIDE,
        512: _row(Tile(16, 32, 4, 3), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
        1024: _NARROW[1024],
    },
    120: {**_NARROW, 512: _row(Tile(16, 32, 4, 3), Tile(32, 32, 8, 2), Tile(64, 16, 8, 2))},
    "gfx942": {
        128: _row(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(32, 16, 4, 1)),
        256: _row(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(32, 16, 4, 1)),
        512: _row(Tile(16, 16, 4, 1), Tile(32, 16, 4, 1), Tile(32, 16, 4, 1)),
        1024: _row(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    },
}
# An fp8 tile is held twice, as codes and decoded, and decoding takes registers: no more than 32 rows.
FP8_TABLE = {
    128: _row(Tile(16, 64, 4, 3), Tile(32, 32, 8, 3), Tile(32, 32, 8, 3)),
    256: _row(Tile(16, 64, 4, 2), Tile(32, 32, 8, 3), Tile(32, 32, 8, 3)),
    512: _row(Tile(16, 32, 4, 3), Tile(32, 16, 8, 3), Tile(32, 16, 8, 3)),
}
# float32 is multiplied without tensor cores, so that it stays float32.
FP32_TILE = Tile(16, 16, 4, 2)


def choose_tile(device: Device, rows: int, rank: int, rope_dim: int, *, itemsize: int = 2, fp8: bool = False) -> Tile:
    """Return the tile for ``rows`` query rows (s_q x H), cut down to what fits the device.

    ``itemsize`` is that of the query: 2, or 4 for float32.

    Raises:
        UnsupportedDeviceError: the table has no such device.
        UnsupportedShapeError: no tile of that rank and RoPE size fits the device's shared memory.
    """
    table = TABLE.get(_TABLE_OF.get(device.arch, device.arch))
    if table is None:
        raise UnsupportedDeviceError(f"the decode kernel has no tiles for {device.arch}", 'use backend="torch"')
    rank_class = next((bound for bound in RANK_CLASSES if rank <= bound), None)
    if rank_class is None or (fp8 and rank_class not in FP8_TABLE):
        raise UnsupportedShapeError(f"no tile fits a latent rank of {rank}", 'use backend="torch"')
    column = next((i for i, bound in enumerate(ROW_CLASSES) if rows <= bound), len(ROW_CLASSES))
    tile = FP8_TABLE[rank_class][column] if fp8 else table[rank_class][column]
    if itemsize == 4:
        tile = replace(FP32_TILE, num_warps=8 if rank > 512 else 4)
    if isinstance(device.arch, str):
        # Four waves have 512 registers a lane, eight have 256.
        tile = replace(tile, block_n=min(tile.block_n, 16 if rank > 256 else 32), num_warps=4, num_stages=1)
    while shared_memory(device, tile, rank, rope_dim, itemsize=itemsize, fp8=fp8) > device.shared_bytes:
        if tile.num_stages > 2:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_n > 16:
            tile = replace(tile, block_n=tile.block_n // 2)
        elif tile.block_m > 16:
            tile = replace(tile, block_m=tile.block_m // 2)
        else:
            raise UnsupportedShapeError(
                f"a latent of rank {rank} with {rope_dim} RoPE dims needs more shared memory than {device.arch} has",
                'use backend="torch", or a 16-bit dtype where this is float32',
            )
    return tile


def shared_memory(device: Device, tile: Tile, rank: int, rope_dim: int, *, itemsize: int = 2, fp8: bool = False) -> int:
    """Return the bytes of shared memory that a block takes: exact but on arch 100 and AMD, where it is a bound.

    The query, num_stages - 1 tiles in flight (num_stages where wgmma reads the tile from shared memory), and the
    softmax weights on their way to the second product.
    """
    chunks = [chunk for chunk in latent_chunks(rank, fp8=fp8) if chunk]
    rope = padded_rope_dim(rope_dim)
    latent = sum(chunks)
    rows, tokens, stages = tile.block_m, tile.block_n, tile.num_stages
    if isinstance(device.arch, str):
        return itemsize * max(rows, tokens) * max(*chunks, rope)
    query = itemsize * rows * (latent + rope)
    if fp8:
        # The RoPE part of an fp8 cache stays bfloat16, 2 bytes each, and a chunk's scale takes 4.
        flight = (stages - 1) * tokens * (latent + 2 * rope + 4 * len(chunks))
        return query + flight + itemsize * tokens * latent + itemsize * rows * tokens
    if itemsize == 4:
        return query + 4 * (stages - 1) * tokens * (latent + rope) + 4 * rows * (tokens + 1)
    if uses_wgmma(device, tile):
        return query + 2 * stages * tokens * (latent + rope)
    return query + 2 * (stages - 1) * tokens * (latent + rope) + 2 * rows * tokens


def uses_wgmma(device: Device, tile: Tile) -> bool:
    """Return whether 16-bit products run on warpgroup instructions: 64 rows and more, from Hopper on."""
    family = _TABLE_OF.get(device.arch, device.arch)
    return family in (90, 100) and tile.block_m >= 64


def blocks_per_multiprocessor(device: Device, tile: Tile, shared: int) -> int:
    """Return how many blocks one multiprocessor runs at a time, from shared memory and about 180 registers a thread."""
    by_shared = device.shared_bytes_per_sm // (shared + 1024)
    by_registers = 65536 // (tile.num_warps * 32 * 180)
    return max(1, min(by_shared, by_registers))


@lru_cache
def latent_chunks(rank: int, *, fp8: bool = False) -> tuple[int, int, int, int]:
    """Return the powers of two whose sum the kernel's tiles cover a latent of ``rank`` channels with; 0 for unused.

    The fewest chunks among those of the smallest sum; where the sum exceeds the rank, the last chunk is masked. An fp8
    cache has a scale for every 128 channels, which no chunk may straddle.
    """
    if fp8:
        whole, rest = divmod(rank, FP8_BLOCK)
        chunks = [FP8_BLOCK] * whole + ([_power_of_two(rest)] if rest else [])
    else:
        chunks = _fewest(rank, 3)
    if len(chunks) > MAX_CHUNKS:
        raise UnsupportedShapeError(
            f"a latent rank of {rank} takes more than {MAX_CHUNKS} chunks", 'use backend="torch"'
        )
    c0, c1, c2, c3 = chunks + [0] * (MAX_CHUNKS - len(chunks))
    return c0, c1, c2, c3


def _fewest(rank: int, available: int) -> list[int]:
    whole = _power_of_two(rank)
    if available == 1 or whole == rank:
        return [whole]
    largest = whole // 2
    if largest < MIN_CHUNK:
        return [whole]
    split = [largest, *_fewest(rank - largest, available - 1)]
    return split if sum(split) < whole else [whole]


def _power_of_two(n: int) -> int:
    return max(MIN_CHUNK, 1 << (n - 1).bit_length())


def padded_rope_dim(rope_dim: int) -> int:
    """Return the width of the RoPE part's tile: a power of two of at least 16."""
    return _power_of_two(rope_dim)
