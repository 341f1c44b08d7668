from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source
from tests.tiny_families import tiny_mixtral


class TestMixtral(AdapterConformance):
    variants: ClassVar = {
        "GQA": tiny_mixtral,
        "MHA-tied": lambda: tiny_mixtral("MHA", tied=True),
        "window": lambda: tiny_mixtral(sliding_window=8),
        "one-expert": lambda: tiny_mixtral(num_experts_per_tok=1),
        "bfloat16": lambda: tiny_mixtral(dtype=torch.bfloat16),
    }


def test_experts_go_one_by_one_to_their_own_names(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_mixtral(), tmp_path)))
    targets = {name: part.target for name, part in source.copied(1)}
    for stored, target in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        name = f"model.layers.1.block_sparse_moe.experts.2.{stored}.weight"
        assert targets[name] == f"model.layers.1.mlp.experts.2.{target}.weight"


def test_more_experts_than_there_are_cannot_answer(tmp_path: Path) -> None:
    folder = save_source(tiny_mixtral(), tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts_per_tok": 4}))
    with pytest.raises(UnsupportedArchitectureError, match="4 of 3 experts"):
        open_source(str(folder))


def test_rope_that_its_class_cannot_make_is_refused_and_not_a_crash(tmp_path: Path) -> None:
    """transformers' YaRN multiplies the config's head_dim, which Mixtral's leaves empty."""
    folder = save_source(tiny_mixtral(), tmp_path)
    path = folder / "config.json"
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    fields = json.loads(path.read_text()) | {"rope_parameters": yarn}
    path.write_text(json.dumps(fields | {"head_dim": None}))
    with pytest.raises(UnsupportedArchitectureError, match="cannot be made from config"):
        open_source(str(folder))
    path.write_text(json.dumps(fields | {"head_dim": 16}))
    assert open_source(str(folder)).spec.rope.kind == "yarn"
