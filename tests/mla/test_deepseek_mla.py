"""The exported class: the paper's equations with every cache, mask and dtype, in the shape that vLLM knows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from mla_convert.mla import DeepseekMLAConfig, DeepseekMLAForCausalLM
from mla_convert.mla.modeling_deepseek_mla import DeepseekMLAAttention
from tests.mla.exported import exported, written
from tests.mla.native import LAYERS, SIZES, VARIANTS, cache_of, logits_by_hand, native, tokens

# Logits are of order one, computed in float32 (6e-8) through three layers of sums over some dozens of terms.
TOLERANCE = 1e-5

SOME = ["plain", "biases", "windows", "unequal"]


def max_difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return (found.double() - expected.double()).abs().max().item()


@pytest.mark.parametrize("pad", [0, 6])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_are_those_of_the_papers_equations(tmp_path: Path, variant: str, pad: int) -> None:
    source, ids = native(variant), tokens()
    model = exported(source, tmp_path, pad=pad)
    expected = torch.stack([logits_by_hand(source, row)[0] for row in ids])
    assert expected.std() > 0.5
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        assert max_difference(model(ids, use_cache=False).logits, expected) <= TOLERANCE


@pytest.mark.parametrize("variant", SOME)
@torch.no_grad()
def test_the_cache_holds_latents_and_gives_the_same(tmp_path: Path, variant: str) -> None:
    source, ids = native(variant), tokens()
    model = exported(source, tmp_path)
    expected = torch.stack([logits_by_hand(source, row)[0] for row in ids])
    given, found, start = {}, [], 0
    for step in (7, 1, 3, 1):
        outputs = model(ids[:, start : start + step], use_cache=True, **given)
        start += step
        field = next(name for name in ("cache", "past_key_values") if outputs.get(name) is not None)
        given = {field: outputs[field]}
        found.append(outputs.logits)
    assert max_difference(torch.cat(found, dim=1), expected) <= TOLERANCE
    config = model.config
    for i, layer in enumerate(cache_of(outputs).layers):
        sliding = config.layer_types is not None and config.layer_types[i] == "sliding_attention"
        kept = config.sliding_window - 1 if sliding else ids.shape[1]
        assert layer.keys.shape == (2, 1, kept, config.kv_lora_rank)
        assert layer.values.shape == (2, 1, kept, config.qk_rope_head_dim)


@pytest.mark.parametrize("variant", SOME)
@torch.no_grad()
def test_generation_with_the_cache_equals_generation_without(tmp_path: Path, variant: str) -> None:
    model, ids = exported(native(variant), tmp_path), tokens()
    options = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, use_cache=False, **options)
    assert expected.shape[1] == ids.shape[1] + 24
    assert torch.equal(model.generate(ids, **options), expected)
    static = model.generate(ids, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(static, expected)


@pytest.mark.parametrize("variant", SOME)
@torch.no_grad()
def test_left_padding_changes_nothing(tmp_path: Path, variant: str) -> None:
    source, ids = native(variant), tokens(batch=1, length=9)
    model = exported(source, tmp_path)
    padded = torch.cat((torch.ones(1, 4, dtype=torch.long), ids), dim=1)
    mask = torch.cat((torch.zeros(1, 4, dtype=torch.long), torch.ones_like(ids)), dim=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert torch.isfinite(found).all()
    assert max_difference(found[0, 4:], logits_by_hand(source, ids[0])[0]) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_latents_norm_is_no_norm(tmp_path: Path, dtype: torch.dtype) -> None:
    """To the last bit, for latents of any size that one meets."""
    norm = exported(native(), tmp_path, dtype=dtype).model.layers[0].self_attn.kv_a_layernorm
    rows = torch.randn(64, SIZES["kv_lora_rank"], generator=torch.Generator().manual_seed(5))
    latents = (rows * 10.0 ** torch.linspace(-3, 3, 64)[:, None]).to(dtype)
    assert torch.equal(norm(latents), latents)


@pytest.mark.parametrize("variant", ["plain", "biases"])
@torch.no_grad()
def test_in_bfloat16_it_is_off_by_no_more_than_the_native_class(tmp_path: Path, variant: str) -> None:
    source, ids = native(variant).to(torch.bfloat16), tokens(batch=4, length=24)
    expected = torch.stack([logits_by_hand(source, row)[0] for row in ids])
    mine = exported(source, tmp_path, dtype=torch.bfloat16)(ids, use_cache=False).logits.double() - expected
    theirs = source(ids, use_cache=False).logits.double() - expected
    assert theirs.square().mean() > 0
    assert mine.square().mean() <= 1.5 * theirs.square().mean()


def test_gradients_reach_every_weight(tmp_path: Path) -> None:
    model, ids = exported(native("biases"), tmp_path), tokens()
    model.train()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_vllms_transformers_backend_finds_the_attention_it_knows() -> None:
    """It rewrites the source of `forward`, and recognises the parts by these names and shapes."""
    assert DeepseekMLAAttention.forward is DeepseekV3Attention.forward
    assert DeepseekMLAAttention.expand_kv is DeepseekV3Attention.expand_kv
    attention = DeepseekMLAAttention(DeepseekMLAConfig(**_config(latent_norm_eps=3.0, query_bias=True)), 0)
    assert attention.kv_a_layernorm.variance_epsilon == 3.0
    assert attention.kv_a_proj_with_mqa.out_features == SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"]
    assert attention.scaling == SIZES["attention_scale"]
    assert attention.q_proj.bias is not None


def test_it_loads_after_the_stock_class_in_one_process(tmp_path: Path) -> None:
    """transformers notes on a class that its experts can be chosen; ours inherits from that class and has none."""
    DeepseekV3ForCausalLM(DeepseekV3Config(**{**_config(), "first_k_dense_replace": LAYERS, "q_lora_rank": None}))
    assert exported(native(), tmp_path)(tokens()).logits.isfinite().all()


def test_importing_the_package_registers_it(tmp_path: Path) -> None:
    folder = written(native(), tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is DeepseekMLAForCausalLM
    assert json.loads((folder / "config.json").read_text())["model_type"] == "deepseek_mla"


def test_without_its_code_it_does_not_load(tmp_path: Path) -> None:
    """Above all not as the stock class, which would answer wrongly."""
    folder = written(native(), tmp_path)
    load = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(folder)!r})"
    run = subprocess.run(
        [sys.executable, "-c", load], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "trust_remote_code" in run.stderr.splitlines()[-1]


def test_configs_that_make_no_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rope_inv_freq .* found \[2, 2, 2\]"):
        DeepseekMLAConfig(**_config(rope_inv_freq=[[1.0, 0.5]] * LAYERS))
    with pytest.raises(ValueError, match="q_lora_rank"):
        DeepseekMLAConfig(**_config(q_lora_rank=8))


def _config(**changes: object) -> dict[str, object]:
    return {**SIZES, "num_key_value_heads": SIZES["num_attention_heads"], **changes}
