"""What a launch takes: its tile and its number of splits, from shapes and the device alone. No triton is needed."""

from __future__ import annotations

from dataclasses import dataclass

from mla_kernels.backends import describe, interpreting
from mla_kernels.checks import DecodeInputs
from mla_kernels.splits import choose_splits
from mla_kernels.tiles import Device, Tile, blocks_per_multiprocessor, choose_tile, shared_memory


@dataclass(frozen=True)
class Launch:
    """The choice for one call.

    Attributes:
        device: what it was made for.
        tile: of the table.
        row_blocks: blocks of query rows of one sequence.
        blocks_per_multiprocessor: estimated to run at a time.
        splits: parts into which each sequence's cache is divided.
    """

    device: Device
    tile: Tile
    row_blocks: int
    blocks_per_multiprocessor: int
    splits: int


def choose_launch(inputs: DecodeInputs, num_splits: int | None = None) -> Launch:
    """Return the tile and splits for checked inputs; ``num_splits`` is taken as it is, where given.

    Raises:
        UnsupportedDeviceError: the tensors' device cannot run the kernel.
        UnsupportedShapeError: no tile fits the rank on this device.
    """
    device, multiprocessors = describe(inputs.q.device)
    batch, queries, heads, _ = inputs.q.shape
    rank, rope_dim = inputs.latent.shape[-1], inputs.rope.shape[-1]
    rows, fp8 = queries * heads, inputs.scales is not None
    # Interpreted, every dtype is multiplied as float32, and large tiles are fast.
    itemsize = 2 if interpreting() else inputs.q.itemsize
    tile = choose_tile(device, rows, rank, rope_dim, itemsize=itemsize, fp8=fp8)
    shared = shared_memory(device, tile, rank, rope_dim, itemsize=itemsize, fp8=fp8)
    blocks = blocks_per_multiprocessor(device, tile, shared)
    row_blocks = -(-rows // tile.block_m)
    if num_splits is None:
        slots = multiprocessors * blocks
        num_splits = choose_splits(
            row_blocks, rows, batch, inputs.capacity, tile.block_n, rank, inputs.token_bytes, slots
        )
    return Launch(device, tile, row_blocks, blocks, num_splits)
