"""Converted layers in sizes and slots that engines ask for: zeros added, slots moved, nothing else changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from mla_convert.errors import FormatError
from mla_convert.mla import MLAWeights

# Two frequencies this close, relative, are one: float32 holds seven digits, and angles are computed in it.
SAME_FREQUENCY = 1e-5


def pad_latent(weights: MLAWeights, kv_rank: int) -> MLAWeights:
    """Return the layer with a latent of `kv_rank` numbers, the added ones always zero: exactly the same answers.

    Raises:
        ValueError: the layer's latent is longer than that.
    """
    added = kv_rank - weights.w_dkv.shape[0]
    if added < 0:
        raise ValueError(f"a latent of {weights.w_dkv.shape[0]} does not fit into {kv_rank}")
    if not added:
        return weights
    return replace(
        weights,
        w_dkv=pad(weights.w_dkv, (0, 0, 0, added)),
        w_uk=pad(weights.w_uk, (0, added)),
        w_uv=pad(weights.w_uv, (0, added)),
        b_dkv=None if weights.b_dkv is None else pad(weights.b_dkv, (0, added)),
    )


def place_slots(weights: MLAWeights, frequencies: Sequence[float]) -> MLAWeights:
    """Return the layer with one RoPE slot for each of `frequencies`, those that it lacks holding zeros.

    Raises:
        FormatError: a slot of the layer turns at none of the frequencies, or more slots at one than there are.
    """
    places = slot_places(weights.inv_freq, frequencies)
    if places is None:
        raise FormatError(
            "the RoPE slots of a layer are not among the frequencies that the format has", "another target"
        )
    half = len(frequencies)
    index = torch.tensor(places, dtype=torch.long)
    order = torch.cat((index, index + half))

    def rows(tensor: Tensor, dim: int) -> Tensor:
        return _scatter(tensor, order, 2 * half, dim)

    return replace(
        weights,
        w_kr=rows(weights.w_kr, 0),
        w_qr=rows(weights.w_qr, 1),
        b_kr=None if weights.b_kr is None else rows(weights.b_kr, 0),
        b_qr=None if weights.b_qr is None else rows(weights.b_qr, 1),
        inv_freq=tuple(float(frequency) for frequency in frequencies),
    )


def slot_places(slots: Sequence[float], frequencies: Sequence[float]) -> list[int] | None:
    """Return for each slot a place of its own among `frequencies` that turns alike; None where there is none."""
    free = sorted(range(len(frequencies)), key=lambda i: frequencies[i])
    places: list[int] = []
    for slot in slots:
        found = next((i for i in free if math.isclose(frequencies[i], slot, rel_tol=SAME_FREQUENCY)), None)
        if found is None:
            return None
        free.remove(found)
        places.append(found)
    return places


def common_frequencies(layers: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the fewest frequencies, highest first, among which every layer's slots have places of their own."""
    needed: list[float] = []
    for slots in layers:
        left = list(needed)
        for slot in slots:
            found = next((f for f in left if math.isclose(f, slot, rel_tol=SAME_FREQUENCY)), None)
            if found is None:
                needed.append(slot)
            else:
                left.remove(found)
    return tuple(sorted(needed, reverse=True))


def _scatter(tensor: Tensor, order: Int[Tensor, " r"], size: int, dim: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = size
    return tensor.new_zeros(shape).index_copy_(dim, order, tensor)
