"""Whole conversions of every family: exact at full size, within the promised cache below it, in both formats."""

from __future__ import annotations

import itertools
import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from mla_convert.evaluate.cache import cache_bytes_per_token
from mla_convert.mla import MLAForCausalLM
from mla_convert.pipeline import ConvertRequest, convert
from mla_convert.plan import largest_rank
from mla_convert.sources import open_source
from tests.tiny import HEAD_DIM, KV_HEADS, VOCAB_SIZE, save_source, tiny_llama, tiny_mistral, tiny_qwen2

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "mha": lambda: tiny_llama("MHA"),
    "gqa": lambda: tiny_llama("GQA"),
    "mqa": lambda: tiny_llama("MQA"),
    "bias": lambda: tiny_llama("GQA", bias=True, mlp_bias=True),
    "mqa-bias": lambda: tiny_llama("MQA", bias=True),
    "tied": lambda: tiny_llama("GQA", tied=True),
    "llama3": lambda: tiny_llama("GQA", llama3=True),
    "mistral-window": lambda: tiny_mistral(window=8),
    "qwen2": lambda: tiny_qwen2("GQA"),
    "qwen2-mha": lambda: tiny_qwen2("MHA"),
    "qwen2-window": lambda: tiny_qwen2("GQA", window=8, tied=True),
}

# Bars of the project for logits of order one in float32; see `difference`.
TO_SOURCE = 1e-4
TO_EACH_OTHER = 1e-5


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Most of the tokenizer's tokens occur: what calibration has not seen, no rank keeps."""
    file = tmp_path_factory.mktemp("e2e-text") / "text.txt"
    characters = random.Random(0).choices(string.printable[:95] + "äöüßéèñçøåæœ", k=6000)
    file.write_text("".join(characters) + "the cat sat on the mat. " * 20)
    return file


def prompt(length: int = 40) -> Tensor:
    return torch.randint(2, VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(1))


def converted(model: PreTrainedModel, folder: Path, **options: Any) -> tuple[Path, dict[str, Any]]:
    source = save_source(model, folder / "source")
    record = convert(ConvertRequest(source=str(source), out=folder / "out", **options))
    return folder / "out", record


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(prompt(), use_cache=False).logits


@torch.no_grad()
def decoded(model: Any, prefill: int) -> Tensor:
    """Logits of every position, the last ones a token at a time from the cache."""
    outputs = model(prompt()[:, :prefill], use_cache=True)
    found = [outputs.logits]
    for at in range(prefill, prompt().shape[1]):
        cache = next(outputs[name] for name in ("cache", "past_key_values") if outputs.get(name) is not None)
        outputs = model(prompt()[:, at : at + 1], past_key_values=cache, use_cache=True)
        found.append(outputs.logits)
    return torch.cat(found, dim=1)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of logits, in units of their standard deviation where that is above 1.

    The random tied models have logits of up to 20 with a standard deviation of 4, and float32 rounds accordingly.
    """
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.std().clamp_min(1.0)).item()


def both_forms_agree(model: MLAForCausalLM) -> bool:
    found = []
    for mode in ("absorbed", "expanded"):
        model.set_attention_mode(mode)
        found.append(logits(model))
    model.set_attention_mode("auto")
    return difference(*found) <= TO_EACH_OTHER


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exact_recipe_gives_the_sources_logits(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    folder, _ = converted(model, tmp_path, recipe="exact", cache=1.0)
    native = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(native, MLAForCausalLM)
    expected = logits(model)
    assert expected.std() > 0.5
    assert difference(logits(native), expected) <= TO_SOURCE
    assert difference(decoded(native, prefill=30), expected) <= TO_SOURCE
    assert both_forms_agree(native)


@pytest.mark.parametrize("family", ["gqa", "bias", "llama3", "mistral-window", "qwen2"])
def test_an_exact_conversion_writes_on_as_its_source(family: str, tmp_path: Path) -> None:
    """Left-padded prompts of two lengths, 64 greedy tokens; windows slide over what was written."""
    model = FAMILIES[family]()
    folder, _ = converted(model, tmp_path, recipe="exact", cache=1.0)
    native = AutoModelForCausalLM.from_pretrained(folder)
    ids, mask = prompt(12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, pad_token_id=1, **options)
    for mode in ("auto", "absorbed", "expanded"):
        native.set_attention_mode(mode)
        assert torch.equal(native.generate(ids, pad_token_id=1, **options), expected)


@pytest.mark.parametrize("recipe", ["default", "forward"])
@pytest.mark.parametrize("family", FAMILIES)
def test_calibrated_recipes_are_exact_at_full_size(family: str, recipe: str, text: Path, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    spec = open_source(str(save_source(model, tmp_path / "source"))).spec
    rope_dim = spec.num_kv_heads * spec.head_dim
    sizes = {"kv_rank": largest_rank(spec, rope_dim), "rope_dim": rope_dim}
    folder, record = converted(
        model, tmp_path, recipe=recipe, **sizes, calibration=(str(text),), calibration_tokens=2048
    )
    native = AutoModelForCausalLM.from_pretrained(folder)
    assert difference(logits(native), logits(model)) <= TO_SOURCE
    assert both_forms_agree(native)
    assert all(layer["truncated"] <= 1e-9 and layer["moved"] <= 1e-9 for layer in record["layer_errors"])


# the class has no window and no feed-forward biases
STOCK = sorted(set(FAMILIES) - {"mistral-window", "qwen2-window", "bias"})


@pytest.mark.parametrize("family", STOCK)
def test_a_stock_folder_at_free_frequencies_gives_the_sources_logits(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    options: dict[str, Any] = {"format": "deepseek", "stock_rope": "longrope"}
    folder, _ = converted(model, tmp_path, recipe="exact", cache=1.0, **options)
    stock = AutoModelForCausalLM.from_pretrained(folder)
    assert type(stock) is DeepseekV3ForCausalLM
    # the frequencies pass through float32 factors, and the latent norm departs from linear by up to 2^-20
    assert difference(logits(stock), logits(model)) <= 1e-3


@pytest.mark.parametrize("family", ["mqa", "mqa-bias"])
def test_one_kv_head_is_exact_in_the_stock_class_at_its_own_frequencies(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    folder, _ = converted(model, tmp_path, recipe="exact", cache=1.0, format="deepseek")
    assert difference(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model)) <= TO_SOURCE


# of llama3's eight frequencies scaling leaves two alone, so four dims; 16 dims are all pairs
@pytest.mark.parametrize(("family", "rope_dim"), [("gqa", 4), ("gqa", 8), ("gqa", 16), ("llama3", 4), ("llama3", 16)])
def test_stock_slots_turn_at_frequencies_of_the_source(family: str, rope_dim: int, text: Path, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    folder, record = converted(
        model,
        tmp_path,
        kv_rank=24,
        rope_dim=rope_dim,
        format="deepseek",
        calibration=(str(text),),
        calibration_tokens=1024,
    )
    stock = AutoModelForCausalLM.from_pretrained(folder)
    turns = DeepseekV3RotaryEmbedding(stock.config).inv_freq
    sources = model.model.rotary_emb.inv_freq
    rows = [sources[::stride][: rope_dim // 2] for stride in range(1, 8)]
    assert any(len(row) == len(turns) and torch.allclose(turns, row, rtol=1e-4, atol=0) for row in rows)
    assert record["verification"]["max_logit_difference"] <= 1e-3
    assert json.loads((folder / "config.json").read_text())["qk_rope_head_dim"] == rope_dim


# heads, KV heads, head dim, width, C, R
SIZES = [
    (4, 2, 16, 64, 20, 8),
    (4, 2, 16, 64, 60, 2),
    (4, 2, 16, 64, 64, 0),
    (6, 3, 8, 42, 7, 14),
    (6, 2, 12, 54, 1, 22),
    (3, 1, 10, 36, 11, 4),
    (5, 5, 4, 25, 13, 20),
    (2, 2, 6, 20, 12, 12),
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_sizes_keep_their_promised_cache(sizes: tuple[int, ...], biased: bool, text: Path, tmp_path: Path) -> None:
    heads, kv_heads, dim, width, rank, rope_dim = sizes
    model = tiny_llama(
        bias=biased, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim, hidden_size=width
    )
    folder, record = converted(
        model, tmp_path, kv_rank=rank, rope_dim=rope_dim, calibration=(str(text),), calibration_tokens=1024
    )
    native = AutoModelForCausalLM.from_pretrained(folder)
    assert cache_bytes_per_token(native) == record["plan"]["cache"]["bytes_per_token"] == 2 * (rank + rope_dim) * 4
    assert record["verification"]["max_logit_difference"] <= TO_SOURCE
    assert both_forms_agree(native)
    assert difference(decoded(native, prefill=37), logits(native)) <= TO_SOURCE


def test_a_thousand_tokens_are_cached_in_the_promised_bytes(tmp_path: Path, text: Path) -> None:
    model = tiny_llama(max_position_embeddings=2048)
    folder, _ = converted(model, tmp_path, cache=0.5, calibration=(str(text),), calibration_tokens=1024)
    native = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(2, VOCAB_SIZE, (1, 1000), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        outputs = native(ids, use_cache=True)
    cache = next(outputs[name] for name in ("cache", "past_key_values") if outputs.get(name) is not None)
    held = {t.untyped_storage().data_ptr(): t for layer in cache.layers for t in (layer.keys, layer.values)}
    half = KV_HEADS["GQA"] * HEAD_DIM
    assert sum(t.untyped_storage().nbytes() for t in held.values()) == 1000 * 2 * half * 4


def test_a_larger_cache_predicts_smaller_errors(tmp_path: Path, text: Path) -> None:
    source = save_source(tiny_llama(), tmp_path / "source")
    statistics = tmp_path / "statistics.safetensors"
    truncated = []
    for rank in (8, 16, 24, 40):
        record = convert(
            ConvertRequest(
                source=str(source),
                out=tmp_path / str(rank),
                kv_rank=rank,
                rope_dim=8,
                calibration=(str(text),),
                calibration_tokens=1024,
                statistics=statistics if statistics.exists() else None,
                save_statistics=None if statistics.exists() else statistics,
            )
        )
        truncated.append([layer["truncated"] for layer in record["layer_errors"]])
    for smaller, larger in itertools.pairwise(truncated):
        assert all(after < before for before, after in zip(smaller, larger, strict=True))


def test_full_size_is_exact_for_tokens_that_calibration_never_saw(tmp_path: Path) -> None:
    model = tiny_llama("GQA")
    text = tmp_path / "narrow.txt"
    text.write_text("the cat sat on the mat and saw the dogs.\n" * 60)
    full = KV_HEADS["GQA"] * HEAD_DIM
    source = str(save_source(model, tmp_path / "source"))
    convert(
        ConvertRequest(
            source, tmp_path / "out", kv_rank=full, rope_dim=full, calibration=(str(text),), calibration_tokens=256
        )
    )
    ids = torch.randint(VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = MLAForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
        assert (found - model(ids).logits).abs().max() <= 1e-4
