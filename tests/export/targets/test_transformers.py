"""The transformers target: what it plans, and that it writes what it planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mla_convert.export.converted import ConvertedModel
from mla_convert.export.targets.target import ExportOptions
from mla_convert.export.targets.transformers import TRANSFORMERS
from mla_convert.progress import silent
from tests.mla.exported import saved
from tests.mla.native import cache_of, native, tokens


@pytest.fixture
def model(tmp_path: Path) -> ConvertedModel:
    return saved(native("unequal"), tmp_path / "native")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_is_what_is_written_and_what_is_cached(model: ConvertedModel, tmp_path: Path, dtype: str) -> None:
    options = ExportOptions(dtype=dtype, max_shard_size="20KB")  # type: ignore[arg-type]
    plan = TRANSFORMERS.plan(model, options)
    assert (plan.form, plan.exact, plan.dtype) == ("custom", True, dtype)
    assert (plan.kv_rank, plan.rope_dim) == (17, 6)
    (tmp_path / "out").mkdir()
    TRANSFORMERS.write(model, plan, options, tmp_path / "out", silent)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == getattr(torch, dtype)
    ids = tokens()
    with torch.no_grad():
        cache = cache_of(loaded(ids, use_cache=True))
    cached = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    assert plan.cache_bytes == cached / ids.numel()
    # 10 + 4, 17 + 0 and 5 + 6 numbers are needed, 17 + 6 in every layer are kept
    assert any("69 cached numbers a token instead of the 42" in note for note in plan.notes)


def test_sizes_can_be_asked_for(model: ConvertedModel, tmp_path: Path) -> None:
    options = ExportOptions(kv_rank=32, rope_dim=8)
    plan = TRANSFORMERS.plan(model, options)
    assert (plan.kv_rank, plan.rope_dim, plan.cache_bytes) == (32, 8, 3 * 40 * 4)
    (tmp_path / "out").mkdir()
    TRANSFORMERS.write(model, plan, options, tmp_path / "out", silent)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (32, 8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ExportOptions(kv_rank=16), "has 17 numbers, more than --kv-rank 16"),
        (ExportOptions(rope_dim=4), "need 6 dims, more than --rope-dim 4"),
        (ExportOptions(rope_dim=7), "--rope-dim 7 is odd"),
        (ExportOptions(dtype="q8_0"), "does not write q8_0"),
        (ExportOptions(form="stock"), "no form 'stock'"),
    ],
)
def test_what_cannot_be_written_is_refused_with_the_reason(
    model: ConvertedModel, options: ExportOptions, said: str
) -> None:
    plan = TRANSFORMERS.plan(model, options)
    assert plan.form is None
    assert any(said in reason for reason in plan.reasons)
    both = TRANSFORMERS.plan(model, replace(options, kv_rank=1, dtype="q8_0"))
    assert len(both.reasons) >= 2


def test_a_model_without_rope_gets_a_slot_that_does_nothing(tmp_path: Path) -> None:
    plan = TRANSFORMERS.plan(saved(native("no-rope"), tmp_path / "native"), ExportOptions())
    assert (plan.kv_rank, plan.rope_dim) == (10, 2)
