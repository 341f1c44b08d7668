"""Tiny models of every kind that calibration meets, and how its numbers are compared."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mla_convert.sources import open_source
from mla_convert.spec import SourceSpec
from tests.tiny import VOCAB_SIZE, save_source, tiny_llama, tiny_mistral, tiny_qwen2

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

MODELS = {
    "mha": lambda: tiny_llama("MHA"),
    "gqa": lambda: tiny_llama("GQA"),
    "mqa": lambda: tiny_llama("MQA"),
    "bias": lambda: tiny_llama("GQA", bias=True),
    "llama3": lambda: tiny_llama("GQA", llama3=True),
    "yarn": lambda: tiny_llama("GQA", rope_parameters=dict(YARN)),
    "window": lambda: tiny_mistral(window=6),
    "qwen2": lambda: tiny_qwen2(window=6),
}


@dataclass(frozen=True)
class Tiny:
    """A model and its description."""

    model: PreTrainedModel
    spec: SourceSpec


def described(model: PreTrainedModel, folder: Path) -> Tiny:
    """The model with the description that its files give, written below `folder`."""
    return Tiny(model, open_source(str(save_source(model, folder / "source"))).spec)


def contexts(count: int, length: int = 14, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB_SIZE, (count, length), generator=torch.Generator().manual_seed(seed))


def stacked(keys: Tensor, values: Tensor) -> Tensor:
    """Keys over values of each token, head by head: [S 2·G·K]."""
    return torch.cat((keys.transpose(0, 1).flatten(1), values.transpose(0, 1).flatten(1)), dim=1)


def as_pairs(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.complex(x[..., :half], x[..., half:])


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """The largest difference is a small share of the largest number."""
    assert found.shape == expected.shape
    assert found.dtype in (torch.float64, torch.complex128)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def same_sums(found: Any, expected: Any, *, rtol: float, atol: float, numbers: float) -> None:
    """Every field agrees: tensors to `rtol` and `atol` of their largest number, plain numbers to a share."""
    assert type(found) is type(expected)
    for field in fields(expected):
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, Tensor):
            assert torch.allclose(mine, theirs, rtol=rtol, atol=atol * theirs.abs().max().item()), field.name
        elif isinstance(theirs, float | int):
            assert mine == pytest.approx(theirs, rel=numbers), field.name
        elif theirs is None:
            assert mine is None
        else:
            same_sums(mine, theirs, rtol=rtol, atol=atol, numbers=numbers)
