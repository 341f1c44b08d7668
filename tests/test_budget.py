"""What caches hold, against published sizes, and against transformers' caches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mla_convert.budget import attention_costs, budget_facts, plan_budgets, sequence_bytes
from mla_convert.evaluate.cache import prefill
from mla_convert.plan import make_plan
from mla_convert.recipe import load_recipe
from mla_convert.spec import MLAShape, QKNormSpec
from tests.test_features import PLAIN
from tests.test_plan import spec
from tests.tiny import tiny_mistral

# DeepSeek-V3's published sizes: 61 layers, 128 heads of 128, a latent of 512 and a RoPE key of 64.
DEEPSEEK_V3 = spec(heads=128, kv_heads=128, dim=128, hidden=7168, layers=61)
DEEPSEEK_SHAPES = (MLAShape(512, 64, nope_dim=128, value_dim=128),) * 61


def test_deepseek_v3_caches_98_percent_less_than_mha() -> None:
    mha, gqa, mqa, mla = attention_costs(DEEPSEEK_V3, DEEPSEEK_SHAPES, "bfloat16")
    assert [cost.kind for cost in (mha, gqa, mqa, mla)] == ["MHA", "GQA", "MQA", "MLA"]
    assert (mha.elements, mqa.elements, mla.elements) == (32768, 256, 576)
    assert gqa.elements == mha.elements  # with a KV head for every query head
    assert mla.bytes_per_token == 61 * 1152 == 70272
    assert mha.bytes_per_token == 61 * 65536
    assert f"{100 * mla.change:.2f}" == "-98.24"
    assert mha.change == 0.0


def test_deepseek_v3_holds_a_long_context_where_mha_holds_none() -> None:
    windows = [None] * 61
    latent = sequence_bytes([576] * 61, windows, 131072, "bfloat16")
    keys_and_values = sequence_bytes([32768] * 61, windows, 131072, "bfloat16")
    assert latent == 131072 * 70272
    assert (80 * 10**9 // latent, 80 * 10**9 // keys_and_values) == (8, 0)


def test_sizes_that_differ_and_scales_of_keys_are_all_counted() -> None:
    normed = replace(PLAIN, qk_norm=QKNormSpec("head", 1e-6))
    shapes = [MLAShape(rank, 4, 8, 8, key_scales=2) for rank in (8, 10, 12, 14)]
    mla = attention_costs(normed, shapes, "float32")[-1]
    assert mla.formula == "C + R + scales"
    assert mla.elements == 11 + 4 + 2
    assert mla.bytes_per_token == (8 + 10 + 12 + 14 + 4 * 6) * 4


@pytest.mark.parametrize(("context", "held"), [(1, 20), (8, 160), (9, 90 + 80), (100, 1000 + 80)])
def test_a_layer_with_a_window_stops_growing(context: int, held: int) -> None:
    assert sequence_bytes([10, 10], [None, 8], context, "float16") == 2 * held


def test_the_window_is_that_of_transformers_cache() -> None:
    """Its cache keeps one token less between steps, as the token that is decoded is in the window too."""
    layers = prefill(tiny_mistral(window=8), 40).layers
    assert [layer.keys.shape[2] + 1 for layer in layers] == [8, 8]


def test_budgets_are_the_plans_of_their_shares() -> None:
    source, recipe = spec(), load_recipe("default")
    budgets = plan_budgets(source, recipe)
    assert [budget.share for budget in budgets] == [1.0, 0.75, 0.5, 0.375, 0.25]
    for budget in budgets:
        assert budget.plan == make_plan(source, recipe=recipe, cache=budget.share)
        assert budget.plan is not None
        assert budget.plan.ratio <= budget.share


def test_a_share_that_the_recipe_cannot_have_says_why() -> None:
    whole, *rest = plan_budgets(spec(), load_recipe("exact"))
    assert whole.plan is not None
    facts = [budget_facts(budget, 0, ("float32",)) for budget in rest]
    assert all(set(row) == {"cache", "error"} for row in facts)
    assert "truncates nothing" in facts[0]["error"]
