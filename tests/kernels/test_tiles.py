"""The tile table and its arithmetic, over every shape the kernel takes: no compiler is needed to refuse one."""

from itertools import product

import pytest

from mla_kernels.errors import UnsupportedDeviceError, UnsupportedShapeError
from mla_kernels.tiles import (
    DEVICES,
    FP8_BLOCK,
    MAX_RANK,
    MIN_RANK,
    TABLE,
    Device,
    choose_tile,
    latent_chunks,
    padded_rope_dim,
    shared_memory,
)


@pytest.mark.parametrize(
    ("rank", "chunks"),
    [
        (16, (16, 0, 0, 0)),
        (96, (64, 32, 0, 0)),
        (160, (128, 32, 0, 0)),
        (448, (256, 128, 64, 0)),
        (512, (512, 0, 0, 0)),
        # 240 = 128 + 64 + 32 + 16 would take a fourth chunk.
        (240, (256, 0, 0, 0)),
        (100, (64, 32, 16, 0)),
        (336, (256, 64, 16, 0)),
    ],
)
def test_chunks_by_hand(rank: int, chunks: tuple[int, ...]) -> None:
    assert latent_chunks(rank) == chunks


@pytest.mark.parametrize("fp8", [False, True])
def test_chunks_cover_every_rank_and_waste_little(fp8: bool) -> None:
    for rank in range(MIN_RANK, (512 if fp8 else MAX_RANK) + 1, 16):
        chunks = [chunk for chunk in latent_chunks(rank, fp8=fp8) if chunk]
        assert all(chunk >= 16 and chunk & (chunk - 1) == 0 for chunk in chunks)
        # Only the last chunk may reach beyond the rank, or a masked channel would lie between two others.
        assert sum(chunks[:-1]) < rank <= sum(chunks)
        if fp8:
            assert all(chunk == FP8_BLOCK for chunk in chunks[:-1])
        else:
            assert sum(chunks) <= rank + max(16, rank // 7)


def test_the_chosen_tile_fits_every_device() -> None:
    """Shared memory a kilobyte over the limit on one device of many (vLLM issue 12498) is refused before a launch."""
    refused = set()
    for device, rank, rope_dim, rows, (itemsize, fp8) in product(
        DEVICES.values(),
        (16, 96, 128, 160, 256, 448, 512, 768, 1024),
        (0, 8, 64, 128),
        (1, 16, 17, 32, 33, 512),
        ((2, False), (4, False), (2, True), (4, True)),
    ):
        try:
            tile = choose_tile(device, rows, rank, rope_dim, itemsize=itemsize, fp8=fp8)
        except UnsupportedShapeError:
            refused.add((rank, itemsize, fp8))
            continue
        assert shared_memory(device, tile, rank, rope_dim, itemsize=itemsize, fp8=fp8) <= device.shared_bytes
        assert tile.block_m >= 16
        assert tile.block_n >= 16
    # Caches of 16 bits up to rank 512 are what the kernel is for: none is refused anywhere.
    assert all(rank > 512 or itemsize == 4 for rank, itemsize, _ in refused)


def test_every_device_of_the_table_is_known() -> None:
    assert set(TABLE) <= set(DEVICES)


def test_an_unknown_device_and_a_rank_too_large_are_named() -> None:
    with pytest.raises(UnsupportedDeviceError, match=r"75.*backend"):
        choose_tile(Device(75, 65536, 65536), 16, 512, 64)
    with pytest.raises(UnsupportedShapeError, match=r"2048.*backend"):
        choose_tile(DEVICES[90], 16, 2048, 64)
    with pytest.raises(UnsupportedShapeError, match="1024"):
        choose_tile(DEVICES[90], 16, 1024, 64, fp8=True)


@pytest.mark.parametrize(("rope_dim", "padded"), [(8, 16), (16, 16), (24, 32), (64, 64), (96, 128), (128, 128)])
def test_the_rope_tile_is_a_power_of_two(rope_dim: int, padded: int) -> None:
    assert padded_rope_dim(rope_dim) == padded
