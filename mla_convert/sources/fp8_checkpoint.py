"""Checkpoints of float8 weights with scales, read as if their weights were stored in bfloat16.

A stored weight is float8_e4m3fn, and what it stands for is weight · scale, with one scale for each block of rows and
columns (DeepSeek's and Qwen's ``weight_scale_inv``, which multiplies in spite of its name), for each row, or for the
whole tensor (``weight_scale`` of compressed-tensors). The product is taken in float32 and rounded to bfloat16, whose 8
bits of precision lose little of float8's 4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import SourceError
from mla_convert.sources.quantisation import unread_quantisation
from mla_convert.sources.safetensors_reader import FLOAT8, SafetensorsCheckpoint

READ_AS = "bfloat16"

_SCALES = ("_scale_inv", "_scale")
# Scales of activations and of a cache in float8: the converted model rounds neither to it.
_UNUSED = re.compile(r"(?:.*\.)?(?:input_scale|activation_scale|output_scale|k_scale|v_scale|q_scale)")


class Float8Checkpoint:
    """A checkpoint whose float8 weights are read as bfloat16 and whose scales are not listed.

    See :class:`~mla_convert.sources.checkpoint.Checkpoint`; made by :func:`open_float8`.
    """

    def __init__(self, stored: SafetensorsCheckpoint, scales: Mapping[str, str], block: tuple[int, int] | None) -> None:
        self._stored = stored
        self._scales = dict(scales)
        self._block = block
        hidden = set(self._scales.values())
        self._names = tuple(
            name for name in stored.names() if name not in hidden and (not scales or _UNUSED.fullmatch(name) is None)
        )

    def names(self) -> tuple[str, ...]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(name)

    def dtype(self, name: str) -> str:
        return READ_AS if name in self._scales else self._stored.dtype(name)

    def read(self, name: str) -> Tensor:
        """One tensor: of a float8 weight its product with its scales, in bfloat16.

        Raises:
            SourceError: the checkpoint holds no such tensor, or it cannot be read.
        """
        if name not in self._scales:
            return self._stored.read(name)
        scale = self._stored.read_any(self._scales[name]).float()
        return dequantised(self._stored.read_any(name), scale, self._block)

    def equal_bytes(self, one: str, other: str) -> bool:
        if not self._stored.equal_bytes(one, other):
            return False
        scales = [self._scales.get(name) for name in (one, other)]
        if None in scales:
            return scales[0] == scales[1]
        return self._stored.equal_bytes(str(scales[0]), str(scales[1]))

    def weight_files(self) -> tuple[Path, ...]:
        return self._stored.weight_files()


def open_float8(stored: SafetensorsCheckpoint, quantisation: Mapping[str, Any]) -> Float8Checkpoint:
    """Return the checkpoint with its float8 weights paired with their scales; reads headers only.

    Args:
        quantisation: config.json's ``quantization_config``, of the method ``fp8`` or ``compressed-tensors``.

    Raises:
        UnsupportedArchitectureError: it says of some weights that they are not float8 with such scales.
        SourceError: a float8 weight has no scale, or one of another shape.
    """
    method = str(quantisation["quant_method"])
    if method == "compressed-tensors":
        _check_compressed(quantisation)
    stated = quantisation.get("weight_block_size")
    names = set(stored.names())
    scales: dict[str, str] = {}
    for name in stored.names():
        kind = stored.dtype(name)
        if kind not in FLOAT8 or any(name.endswith(suffix) for suffix in _SCALES):
            continue
        found = next((name + suffix for suffix in _SCALES if name + suffix in names), None)
        if found is None or kind != "F8_E4M3" or len(stored.shape(name)) != 2:
            what = "without a scale" if found is None else f"of shape {list(stored.shape(name))} and type {kind}"
            raise unread_quantisation(method, f"'{name}' {what}")
        scales[name] = found
    block = (int(stated[0]), int(stated[1])) if stated else _block_of_groups(quantisation)
    for name, scale in scales.items():
        _check_scale(name, stored.shape(name), stored.shape(scale), block)
    return Float8Checkpoint(stored, scales, block)


def dequantised(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return weight · scale in bfloat16, [rows columns].

    Args:
        weight: float8, [rows columns].
        scale: float32, of one number, [rows 1] or [rows], or [⌈rows / block⌉ ⌈columns / block⌉].
        block: rows and columns that share a scale; None where scales are for rows or the tensor.
    """
    rows, columns = weight.shape
    value = weight.to(torch.float32)
    if scale.numel() == 1:
        value *= scale.reshape(())
    elif block is None:
        value *= scale.reshape(rows, 1)
    else:
        height, width = block
        for i, factors in enumerate(scale):
            value[i * height : (i + 1) * height] *= factors.repeat_interleave(width)[:columns]
    return value.to(torch.bfloat16)


def _check_scale(name: str, weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> None:
    one = scale in ((), (1,), (1, 1))
    rows = block is None and scale in ((weight[0],), (weight[0], 1))
    blocks = block is not None and scale == (-(-weight[0] // block[0]), -(-weight[1] // block[1]))
    if not (one or rows or blocks):
        shared = "for each row" if block is None else f"for each block of {block[0]} by {block[1]}"
        raise SourceError(
            f"the scales of '{name}' {list(weight)} are {list(scale)}, which is not one {shared}",
            "check that quantization_config in config.json belongs to these weights",
        )


def _check_compressed(quantisation: Mapping[str, Any]) -> None:
    """Refuse what compressed-tensors stores other than float8 weights with a scale."""
    for group in _groups(quantisation):
        weights = group.get("weights") or {}
        if weights.get("type") != "float" or weights.get("num_bits") != 8 or not weights.get("symmetric", True):
            found = f"{weights.get('num_bits')}-bit {weights.get('type')} weights"
            raise unread_quantisation("compressed-tensors", f"with {found}")
        if weights.get("strategy") not in ("tensor", "channel", "block"):
            raise unread_quantisation("compressed-tensors", f"with scales by {weights.get('strategy')}")
    sparsity = (quantisation.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise unread_quantisation("compressed-tensors", f"sparse in the format {sparsity}")
    if (quantisation.get("transform_config") or {}).get("config_groups"):
        raise unread_quantisation("compressed-tensors", "with weights rotated by a transform")


def _block_of_groups(quantisation: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block size of compressed-tensors' groups, where they have one."""
    for group in _groups(quantisation):
        structure = (group.get("weights") or {}).get("block_structure")
        if structure:
            return int(structure[0]), int(structure[1])
    return None


def _groups(quantisation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((quantisation.get("config_groups") or {}).values())
