"""What the compiler makes of the kernel for devices that are not here: every entry of the tile table.

By default four devices' tiles at rank 512, the largest and tightest, and one of each variant; `-m slow` compiles the
rest of the table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from mla_kernels.tiles import (
    DEVICES,
    FP8_TABLE,
    TABLE,
    Tile,
    choose_tile,
    latent_chunks,
    padded_rope_dim,
    shared_memory,
    uses_wgmma,
)
from tests.kernels.aot import Build, Resources, compile_all

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler has wheels for Linux only"),
    # The first test of each kind compiles for all.
    pytest.mark.timeout(1800),
]

ROWS = (16, 32, 64)


def table_builds(archs: Iterable[int | str], ranks: tuple[int, ...]) -> list[Build]:
    """Return every different entry of the table for these, each with the RoPE size of DeepSeek's models."""
    builds = [
        Build(arch, choose_tile(DEVICES[arch], rows, rank, 64), rank)
        for arch in archs
        for rank in ranks
        for rows in ROWS
    ]
    return list(dict.fromkeys(builds))


def fp8_builds(archs: tuple[int | str, ...], ranks: tuple[int, ...]) -> list[Build]:
    builds = [
        Build(arch, choose_tile(DEVICES[arch], rows, rank, 64, fp8=True), rank, fp8=True)
        for arch in archs
        for rank in ranks
        for rows in ROWS
    ]
    return list(dict.fromkeys(builds))


def fp32_build(arch: int | str, rank: int) -> Build:
    return Build(arch, choose_tile(DEVICES[arch], 16, rank, 64, itemsize=4), rank, dtype="fp32")


HOPPER = Build(90, choose_tile(DEVICES[90], 16, 512, 64), 512)
TWO_TILE = replace(HOPPER, kernel="tests.kernels.two_tile:two_tile_kernel")
FEWER_STAGES = replace(HOPPER, tile=replace(HOPPER.tile, num_stages=2))
# What the launcher may ask of one tile: three chunks, a masked chunk, small pages, a window, more queries, float16.
VARIANTS = [
    replace(HOPPER, rank=448),
    replace(HOPPER, rank=240),
    replace(HOPPER, rope_dim=32, rank=160, tile=choose_tile(DEVICES[90], 16, 160, 32)),
    replace(HOPPER, page=16),
    replace(HOPPER, paged=False),
    replace(HOPPER, causal=True, window=True),
    replace(HOPPER, dtype="fp16"),
    Build(80, choose_tile(DEVICES[80], 16, 512, 64, fp8=True), 512, dtype="fp16", fp8=True),
    fp32_build(90, 512),
    fp32_build("gfx942", 512),
]
QUICK_ARCHS = (80, 90, 120, "gfx942")
QUICK = [*table_builds(QUICK_ARCHS, (512,)), *fp8_builds((90,), (512,)), *VARIANTS]
WHOLE = [
    *table_builds([arch for arch in TABLE if arch not in QUICK_ARCHS], (512,)),
    *table_builds(TABLE, (128, 256, 1024)),
    *fp8_builds((80, 86, 89, 120, "gfx942"), (512,)),
    *fp8_builds((80, 90), (128, 256)),
]
WHOLE += [fp32_build(arch, rank) for arch in (80, 86, 120) for rank in (128, 512)]


def named(build: Build) -> str:
    tile = build.tile
    plain = Build(build.arch, tile, build.rank)
    special = [f"{name}={value}" for name, value in vars(build).items() if value != getattr(plain, name)]
    sizes = f"{tile.block_m}x{tile.block_n}-w{tile.num_warps}-s{tile.num_stages}"
    return "-".join([str(build.arch), f"c{build.rank}", sizes, *special])


@cache
def compiled(slow: bool) -> dict[Build, Resources | str]:
    """Compile all builds of a kind at once, on every processor."""
    builds = WHOLE if slow else [*QUICK, TWO_TILE, FEWER_STAGES]
    return dict(zip(builds, compile_all(builds), strict=True))


def resources(build: Build) -> Resources:
    found = compiled(slow=build in WHOLE)[build]
    assert isinstance(found, Resources), found
    return found


def with_marks(builds: list[Build], *marks: pytest.MarkDecorator) -> list:
    return [pytest.param(build, id=named(build), marks=marks) for build in builds]


EVERY = [*with_marks(QUICK), *with_marks(WHOLE, pytest.mark.slow)]


@pytest.mark.parametrize("build", EVERY)
def test_a_tile_compiles_into_what_is_stated(build: Build) -> None:
    """Shared memory by the formula and within the limit; no spills up to 32 rows; the tensor cores that are there."""
    device, tile = DEVICES[build.arch], build.tile
    found = resources(build)
    itemsize = 4 if build.dtype == "fp32" else 2
    stated = shared_memory(device, tile, build.rank, build.rope_dim, itemsize=itemsize, fp8=build.fp8)
    assert found.shared <= device.shared_bytes
    if isinstance(build.arch, str) or (build.arch == 100 and uses_wgmma(device, tile)):
        # Fifth-generation tensor cores and AMD's compiler have other buffers: the formula is a bound there.
        assert found.shared <= stated
    else:
        assert found.shared == stated
    if tile.block_m <= 32:
        assert found.spilled == 0
    if build.dtype == "fp32":
        return
    wanted = "MFMA" if isinstance(build.arch, str) else "HMMA"
    if uses_wgmma(device, tile):
        wanted = {90: "HGMMA", 100: "UTCHMMA"}[int(build.arch)]
    assert found.opcodes[wanted] > 0


def test_more_stages_are_more_buffers() -> None:
    """A page looked up inside the loop takes a pipeline stage and leaves one buffer, whatever num_stages says."""
    tile_bytes = 2 * HOPPER.tile.block_n * (512 + 64)
    assert resources(HOPPER).shared - resources(FEWER_STAGES).shared == tile_bytes


def test_one_latent_tile_is_loaded_where_others_load_two() -> None:
    """Sixteen bytes a thread and copy: 32 rows of 576 channels for ours, and of 512 more for keys and values apart."""
    threads = 32 * HOPPER.tile.num_warps
    ours, theirs = resources(HOPPER).loop_copies, resources(TWO_TILE).loop_copies
    assert ours * threads * 16 == 2 * HOPPER.tile.block_n * (512 + 64)
    assert theirs * threads * 16 == 2 * HOPPER.tile.block_n * (512 + 64 + 512)
    assert ours / theirs == pytest.approx(0.53, abs=0.01)


def test_the_table_is_covered() -> None:
    """Every entry is among the builds, so that a new one cannot be left out."""
    tiles = {(build.arch, build.tile) for build in (*QUICK, *WHOLE) if not build.fp8}
    for arch, ranks in TABLE.items():
        for row in ranks.values():
            assert {(arch, tile) for tile in row} <= tiles
    fp8_tiles = {build.tile for build in (*QUICK, *WHOLE) if build.fp8}
    assert {tile for row in FP8_TABLE.values() for tile in row} <= fp8_tiles


def test_shared_memory_by_hand() -> None:
    """16 query rows of 576 channels, two tiles of 32 tokens in flight, 16 x 32 weights; 2 bytes each."""
    assert shared_memory(DEVICES[90], Tile(16, 32, 4, 3), 512, 64) == 2 * (16 * 576 + 2 * 32 * 576 + 16 * 32)
    assert sum(latent_chunks(512)) + padded_rope_dim(64) == 576
