"""Progressions of frequencies: the shortest that holds every layer's slots, and refusals with the reason."""

from __future__ import annotations

import pytest
import torch

from mla_convert.errors import FormatError
from mla_convert.export.padding import slot_places
from mla_convert.export.progression import fit_progression


def frequencies(base: float, dim: int) -> list[float]:
    """As transformers computes them, in float32."""
    return (1.0 / base ** (torch.arange(0, dim, 2).float() / dim)).tolist()


@pytest.mark.parametrize(("base", "dim"), [(10000.0, 64), (500000.0, 128), (1000000.0, 80), (10000.0, 2)])
def test_the_base_of_a_whole_set_is_found_again(base: float, dim: int) -> None:
    found = fit_progression([frequencies(base, dim)])
    assert found.dim == dim
    assert found.base == (base if dim > 2 else 10000.0)


def test_layers_that_keep_some_slots_share_the_fewest_places() -> None:
    every = frequencies(10000.0, 64)
    layers = [[every[i] for i in (12, 3, 0)], [every[i] for i in (6, 21)]]
    found = fit_progression(layers)
    assert found.dim == 2 * (21 // 3 + 1)
    for slots in layers:
        places = slot_places(slots, found.frequencies)
        assert places is not None
        for slot, place in zip(slots, places, strict=True):
            assert found.frequencies[place] == pytest.approx(slot, rel=1e-6)


def test_more_dims_add_lower_frequencies() -> None:
    every = frequencies(10000.0, 16)
    found = fit_progression([every[:3]], dim=12)
    assert found.dim == 12
    assert found.frequencies[:6] == pytest.approx(every[:6], rel=1e-6)
    with pytest.raises(FormatError, match="4 RoPE dims do not hold"):
        fit_progression([every[:3]], dim=4)


def test_layers_without_slots_need_one_place() -> None:
    assert fit_progression([[], []]).dim == 2


def test_two_slots_at_one_frequency_are_refused() -> None:
    every = frequencies(10000.0, 16)
    with pytest.raises(FormatError, match="layer 1 has several RoPE slots at one frequency"):
        fit_progression([every, [every[0], every[2], every[2]]])


@pytest.mark.parametrize("slots", [[0.5, 0.3, 0.2111], [1.5], [1.0, 1e-3, 7.1e-4, 3.3e-5], [1.0, 0.0]])
def test_frequencies_of_no_progression_are_refused(slots: list[float]) -> None:
    with pytest.raises(FormatError, match="not powers of one number"):
        fit_progression([slots])
