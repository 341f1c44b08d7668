"""Converted layers kept in files: they come back as they were, or not at all."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mla_convert.layer_store import LayerStore
from mla_convert.recipe import load_recipe
from mla_convert.spec import MLAShape
from mla_convert.transform import ConvertedLayer, convert_layer
from tests.layer_case import case


def layer(rank: int = 1, rope: int = 0) -> ConvertedLayer:
    """By default with a single row, whose stride is a wider matrix's, and with empty RoPE matrices."""
    c = case(biased=True, norms="head", turning=2)
    return convert_layer(c.weights, c.statistics, c.rope, MLAShape(rank, rope, 6, 6, 2), load_recipe("default"))


def test_a_layer_comes_back_in_float32(tmp_path: Path) -> None:
    for index, made in enumerate((layer(), layer(7, 4))):
        store = LayerStore(tmp_path, "key")
        store.save(index, made)
        found = store.load(index)
        assert found is not None
        assert (found.errors, found.damping) == (made.errors, made.damping)
        assert torch.equal(found.spectrum, made.spectrum)
        for name, value in vars(made.weights.to(torch.float32)).items():
            mine = getattr(found.weights, name)
            assert torch.equal(mine, value) if isinstance(value, Tensor) else mine == value, name


def test_what_is_absent_damaged_or_of_another_key_is_not_there(tmp_path: Path) -> None:
    store = LayerStore(tmp_path, "key")
    assert store.load(0) is None
    store.save(0, layer(7, 4))
    assert LayerStore(tmp_path, "another").load(0) is None
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[-5] ^= 1  # one bit of a weight
    file.write_bytes(content)
    assert store.load(0) is None


def test_hidden_states_are_kept_until_they_are_dropped(tmp_path: Path) -> None:
    store = LayerStore(tmp_path, "key")
    first, second = (torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    store.save_streams(1, (first, second))
    store.save_streams(2, (second, first))
    store.drop_streams(1)
    assert store.load_streams(1) is None
    found = store.load_streams(2)
    assert found is not None
    assert torch.equal(found[0], second)
    assert torch.equal(found[1], first)
    assert LayerStore(tmp_path, "another").load_streams(2) is None
