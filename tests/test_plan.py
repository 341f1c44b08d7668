"""Plans keep the budget to the number, refuse what cannot be, and name frequencies that a stock class really has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mla_convert.errors import PlanError
from mla_convert.plan import ConversionPlan, largest_rank, make_plan
from mla_convert.recipe import AllocationRecipe, available_recipes, load_recipe
from mla_convert.spec import MLAShape, QKNormSpec, RopeSpec, SourceSpec
from tests.tiny import LLAMA3_ROPE

LLAMA_3_2 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def frequencies(dim: int, parameters: dict[str, Any] | None = None) -> tuple[float, ...]:
    """Those of transformers' own rotary module."""
    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=dim,
        rope_parameters=dict(parameters or {"rope_type": "default", "rope_theta": 10000.0}),
        max_position_embeddings=131072,
    )
    return tuple(LlamaRotaryEmbedding(config).inv_freq.tolist())


def spec(
    *,
    heads: int = 9,
    kv_heads: int = 3,
    dim: int = 64,
    hidden: int = 576,
    biased: bool = False,
    rope: dict[str, Any] | None = None,
    layers: int = 30,
) -> SourceSpec:
    """SmolLM2-135M's sizes unless stated."""
    kind = (rope or {}).get("rope_type", "default")
    return SourceSpec(
        architecture="LlamaForCausalLM",
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=1536,
        vocab_size=49152,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rope=RopeSpec(dim, frequencies(dim, rope), kind, rope or {"rope_type": kind, "rope_theta": 10000.0}),
        attention_scale=dim**-0.5,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        max_position_embeddings=8192,
        query_bias=biased,
        key_bias=biased,
        value_bias=biased,
        output_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        windows=(None,) * layers,
        dtype="float32",
    )


def planned(source: SourceSpec, recipe: str = "default", **sizes: Any) -> ConversionPlan:
    return make_plan(source, recipe=load_recipe(recipe), **sizes)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 4),
    dim=st.integers(1, 32).map(lambda half: 2 * half),
    hidden=st.integers(8, 600),
    biased=st.booleans(),
    share=st.floats(0.01, 1.0),
    recipe=st.sampled_from(sorted(available_recipes())),
    format=st.sampled_from(["native", "deepseek"]),
    stock_rope=st.sampled_from(["default", "longrope"]),
)
def test_a_budget_is_never_exceeded(kv_heads, group, dim, hidden, biased, share, recipe, format, stock_rope) -> None:
    source = spec(heads=kv_heads * group, kv_heads=kv_heads, dim=dim, hidden=hidden, biased=biased, layers=2)
    try:
        plan = planned(source, recipe, cache=share, format=format, stock_rope=stock_rope)
    except PlanError:
        plan = None
    if plan is None:  # the whole cache is a budget that any recipe meets, but for a progression of frequencies
        assert share < 1.0 or format == "deepseek"
        return
    for shape in plan.layers:
        assert shape.cached == shape.kv_rank + shape.rope_dim <= share * 2 * kv_heads * dim + 1e-6
        assert shape.rope_dim % 2 == 0
        assert 0 <= shape.rope_dim <= kv_heads * dim
        assert 1 <= shape.kv_rank <= min(2 * kv_heads * dim, hidden + int(biased))
        assert (shape.nope_dim, shape.value_dim) == (dim, dim)
    assert plan.ratio <= share + 1e-6
    if format == "deepseek":
        assert plan.layers[0].rope_dim >= 2


@settings(max_examples=100, deadline=None, derandomize=True)
@given(first=st.floats(0.05, 1.0), second=st.floats(0.05, 1.0))
def test_a_larger_budget_never_gives_a_smaller_cache(first, second) -> None:
    small, large = sorted((first, second))
    cached = [planned(spec(), cache=share).cached_per_token_layer for share in (small, large)]
    assert cached[0] <= cached[1]


@pytest.mark.parametrize(
    ("share", "cached"), [(1.0, 384), (0.5, 192), (160 / 384, 160), (256 / 384, 256), (1 / 3, 128)]
)
def test_a_budget_is_used_up(share: float, cached: int) -> None:
    """Shares that are not exact in binary floating point lose no number to it."""
    assert planned(spec(), cache=share).cached_per_token_layer == cached


def test_half_the_cache_without_a_budget() -> None:
    assert planned(spec()).cached_per_token_layer == 192
    assert planned(spec(), "exact").layers[0] == MLAShape(kv_rank=192, rope_dim=192, nope_dim=64, value_dim=64)


def test_bytes_are_those_of_every_layer() -> None:
    plan = planned(spec(), kv_rank=144, rope_dim=48)
    assert plan.layers == (MLAShape(144, 48, 64, 64),) * 30
    assert plan.cache_bytes_per_token("float32") == 192 * 30 * 4
    assert plan.cache_bytes_per_token("bfloat16") == 192 * 30 * 2
    assert plan.source_cache_bytes_per_token("bfloat16") == 2 * 3 * 64 * 30 * 2
    assert plan.ratio == 0.5


def test_deepseek_v3s_sizes() -> None:
    """512 + 64 of 128 heads' 2 · 128: 98.2 % less."""
    source = spec(heads=128, kv_heads=128, dim=128, hidden=7168, layers=61)
    plan = planned(source, kv_rank=512, rope_dim=64)
    assert plan.cache_bytes_per_token("bfloat16") == 61 * 1152
    assert plan.source_cache_bytes_per_token("bfloat16") == 61 * 65536


def test_transmlas_recipe_keeps_one_slot_for_each_pair() -> None:
    for share in (0.3, 0.5, 1.0):
        assert planned(spec(), "transmla", cache=share).layers[0].rope_dim == 64


@pytest.mark.parametrize("share", [0.0, -0.5, 1.0001, float("nan"), float("inf")])
def test_a_share_out_of_range(share: float) -> None:
    with pytest.raises(PlanError, match="not above 0 and at most 1"):
        planned(spec(), cache=share)


@pytest.mark.parametrize(
    ("recipe", "sizes", "said"),
    [
        ("default", {"kv_rank": 10, "rope_dim": 7}, "not even"),
        ("default", {"kv_rank": 10, "rope_dim": -2}, "not even"),
        ("default", {"kv_rank": 10, "rope_dim": 194}, "more than the source's keys have, 192"),
        ("default", {"kv_rank": 0, "rope_dim": 16}, "not between 1 and the full rank"),
        ("default", {"kv_rank": 337, "rope_dim": 48}, "full rank 336 beside 48"),
        ("default", {"kv_rank": 385, "rope_dim": 0}, "full rank 384"),
        ("transmla", {"kv_rank": 100, "rope_dim": 66}, "33 pairs; a head has 32"),
        ("exact", {"cache": 0.5}, "leaves no latent|truncates nothing"),
        ("exact", {"kv_rank": 100, "rope_dim": 192}, "truncates nothing"),
        ("exact", {"kv_rank": 192, "rope_dim": 64}, "keeps all 192"),
        ("transmla", {"cache": 0.1}, "leaves no latent beside 64"),
        ("default", {"cache": 0.001}, "leaves no latent"),
        ("default", {"kv_rank": 10, "rope_dim": 0, "format": "deepseek"}, "needs RoPE dims"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be(recipe: str, sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        planned(spec(), recipe, **sizes)
    assert caught.value.remedy


def test_the_remedys_share_is_enough() -> None:
    with pytest.raises(PlanError) as caught:
        planned(spec(), "transmla", cache=0.1)
    share = float(caught.value.remedy.split()[3].rstrip(","))
    assert planned(spec(), "transmla", cache=share + 0.001).layers[0].kv_rank >= 1


def test_the_largest_rank_is_what_linear_algebra_allows() -> None:
    """The rank of [W_K without its slots; W_V] over x, counted on random matrices."""
    for kv_heads, dim, hidden, biased, rope in (
        (3, 8, 40, False, 10),
        (3, 8, 20, False, 10),
        (2, 8, 12, True, 0),
        (2, 8, 64, True, 16),
        (4, 8, 33, False, 30),
    ):
        source = spec(heads=kv_heads, kv_heads=kv_heads, dim=dim, hidden=hidden, biased=biased, layers=1)
        generator = torch.Generator().manual_seed(0)
        width = kv_heads * dim
        rows = torch.randn(2 * width, hidden + int(biased), generator=generator, dtype=torch.float64)
        residual = torch.eye(width, dtype=torch.float64)
        residual[:rope, :rope] = 0  # rope of the key's width directions keep their rotation
        rows[:width] = residual @ rows[:width]
        assert largest_rank(source, rope) == torch.linalg.matrix_rank(rows).item()


def stock_frequencies(theta: float, dim: int) -> torch.Tensor:
    """What DeepSeek's class turns its slots by, given only a base."""
    config = DeepseekV3Config(
        qk_rope_head_dim=dim,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=4096,
    )
    return DeepseekV3RotaryEmbedding(config).inv_freq


@pytest.mark.parametrize("rope", [None, LLAMA3_ROPE, LLAMA_3_2], ids=["default", "llama3-tiny", "llama-3.2"])
@pytest.mark.parametrize("slots", [2, 3, 4, 6, 7, 8, 9, 10, 12, 16, 31])
def test_strides_are_those_whose_pairs_turn_at_the_classs_own_frequencies(rope, slots: int) -> None:
    source = spec(rope=rope)
    turns = torch.tensor(source.rope.inv_freq)
    expected = []
    for stride in range(1, len(turns)):
        pairs = turns[::stride][:slots]
        if len(pairs) == slots:
            stock = stock_frequencies(source.rope.inv_freq[stride] ** -slots, 2 * slots)
            # the class raises a float32 base to float32 powers; scaling moves a frequency by percents or not at all
            if torch.allclose(stock, pairs, rtol=2e-5, atol=0):
                expected.append(stride)
    if expected:
        assert planned(source, kv_rank=64, rope_dim=2 * slots, format="deepseek").rope_strides == tuple(expected)
    else:
        with pytest.raises(PlanError, match="cannot hold"):
            planned(source, kv_rank=64, rope_dim=2 * slots, format="deepseek")


def test_every_progression_of_an_unscaled_rope_is_found() -> None:
    """Pairs 0, s, 2s, ... of a geometric progression are one for any s, as far as there are pairs."""
    plan = planned(spec(), kv_rank=64, rope_dim=16, format="deepseek")
    assert plan.rope_strides == tuple(s for s in range(1, 32) if 7 * s <= 31)


def test_llama_3s_scaling_limits_the_slots_to_the_pairs_it_leaves_alone() -> None:
    source = spec(rope=LLAMA_3_2)
    unscaled = frequencies(64, {"rope_type": "default", "rope_theta": 500000.0})
    alone = sum(abs(a / b - 1) < 1e-5 for a, b in zip(source.rope.inv_freq, unscaled, strict=True))
    assert 2 < alone < 32
    assert planned(source, kv_rank=64, rope_dim=2 * alone, format="deepseek").rope_strides == (1,)
    with pytest.raises(PlanError, match="cannot hold"):
        planned(source, kv_rank=64, rope_dim=2 * alone + 2, format="deepseek")
    budgeted = planned(source, cache=1.0, format="deepseek")
    assert budgeted.layers[0].rope_dim <= 2 * alone
    assert budgeted.rope_strides


def test_with_a_slot_for_every_pair_any_scaling_is_the_classs_own() -> None:
    assert planned(spec(rope=LLAMA_3_2), kv_rank=64, rope_dim=64, format="deepseek").rope_strides == (1,)


def test_free_frequencies_need_no_strides() -> None:
    source = spec(rope=LLAMA_3_2)
    for options in ({"format": "native"}, {"format": "deepseek", "stock_rope": "longrope"}):
        plan = planned(source, kv_rank=64, rope_dim=40, **options)
        assert plan.rope_strides == ()
        assert plan.layers[0].rope_dim == 40


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rope_dim=st.integers(1, 32).map(lambda half: 2 * half), share=st.floats(0.2, 1.0))
def test_a_budgeted_stock_plan_has_a_progression_to_go_with_it(rope_dim: int, share: float) -> None:
    source = spec(rope=LLAMA_3_2)
    assume(rope_dim <= source.max_rope_dim)
    plan = planned(source, cache=share, format="deepseek")
    assert plan.rope_strides
    assert max(plan.rope_strides) * (plan.layers[0].rope_dim // 2 - 1) < len(source.rope.inv_freq)


def test_a_plan_is_frozen_and_carries_what_it_came_from() -> None:
    source = spec()
    plan = planned(source, cache=0.5)
    assert plan.source is source
    assert plan.recipe.name == "default"
    assert len(plan.layers) == source.num_layers
    with pytest.raises(AttributeError):
        plan.format = "deepseek"  # type: ignore[misc]
    assert replace(plan, format="deepseek").format == "deepseek"


@pytest.mark.parametrize("sizes", [{"kv_rank": 3}, {"rope_dim": 4}, {"cache": 0.5, "kv_rank": 3, "rope_dim": 2}])
def test_half_a_size_or_two_sizes_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="share"):
        make_plan(spec(), recipe=load_recipe("default"), **sizes)


def test_a_stock_budget_under_linear_scaling_takes_every_frequency_of_the_source() -> None:
    linear = spec(rope={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    plan = make_plan(linear, recipe=load_recipe("default"), cache=0.5, format="deepseek")
    assert plan.layers[0].rope_dim == linear.rope.dim
    assert plan.layers[0].cached == linear.kv_width // 2


def test_the_remedy_for_frequencies_that_a_stock_class_lacks_is_one() -> None:
    llama = spec(rope=LLAMA3_ROPE)
    with pytest.raises(PlanError) as refused:
        make_plan(llama, recipe=load_recipe("default"), kv_rank=100, rope_dim=62, format="deepseek")
    most = int(refused.value.remedy.split("at most ")[1].split()[0])
    for rope_dim in (most, llama.rope.dim):
        make_plan(llama, recipe=load_recipe("default"), kv_rank=100, rope_dim=rope_dim, format="deepseek")


def test_only_a_native_budget_is_left_to_be_divided() -> None:
    recipe = load_recipe("default")
    allocating = replace(recipe, allocation=AllocationRecipe("predicted", "waterfill", 8, 0.5, 64))
    for sizes in ({}, {"cache": 0.4}):
        plan = make_plan(spec(), recipe=allocating, **sizes)
        assert plan.provisional
        assert plan.layers == make_plan(spec(), recipe=replace(recipe, allocation=None), **sizes).layers
        assert not make_plan(spec(), recipe=replace(recipe, allocation=None), **sizes).provisional
        assert not make_plan(spec(), recipe=allocating, format="deepseek", **sizes).provisional
    assert not make_plan(spec(), recipe=allocating, kv_rank=144, rope_dim=48).provisional
    idle = AllocationRecipe("share", "uniform", 8, 0.5, 64)
    assert not make_plan(spec(), recipe=replace(recipe, allocation=idle), cache=0.5).provisional


def test_key_scales_are_part_of_the_budget_but_at_the_whole_cache() -> None:
    """One number for each KV head that is normalised: below the whole cache C + R leaves room for them."""
    normed = replace(spec(), qk_norm=QKNormSpec("head", 1e-6))
    recipe = load_recipe("default")
    for share in (0.25, 0.5):
        (shape, *_) = make_plan(normed, recipe=recipe, cache=share).layers
        assert shape.key_scales == normed.num_kv_heads
        assert shape.kv_rank + shape.rope_dim + normed.num_kv_heads == int(share * normed.kv_width)
    (whole, *_) = make_plan(normed, recipe=recipe, cache=1.0).layers
    (plain, *_) = make_plan(spec(), recipe=recipe, cache=1.0).layers
    assert (whole.kv_rank, whole.rope_dim) == (plain.kv_rank, plain.rope_dim)
