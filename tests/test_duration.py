"""How long a conversion takes: what its parts depend on, and a rate that a machine can have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_convert.duration import Work, conversion_work
from mla_convert.plan import make_plan
from mla_convert.recipe import CalibrationRecipe, Recipe, load_recipe
from mla_convert.sources import open_source
from mla_convert.spec import BlockSpec, SourceSpec
from mla_convert.speed import matmul_rate
from tests.test_plan import spec
from tests.tiny import save_source, tiny_llama


def work(recipe: str | Recipe = "default", source: SourceSpec | None = None, **how: bool) -> Work:
    method = load_recipe(recipe) if isinstance(recipe, str) else recipe
    return conversion_work(make_plan(source or spec(), recipe=method), **how)


def test_a_calibration_takes_its_tokens_times_twice_and_four_times_the_weights() -> None:
    """SmolLM2-135M's 134,515,008 weights, of which norms are a few ten thousand."""
    recipe = load_recipe("default")
    assert recipe.calibration is not None
    products = 4 * 134_500_000 * recipe.calibration.tokens
    assert products < work().calibrate < 2 * products
    half = replace(recipe, calibration=CalibrationRecipe(recipe.calibration.tokens // 2, recipe.calibration.context))
    assert work(half).calibrate == pytest.approx(work().calibrate / 2)
    assert work("forward").calibrate < 0.7 * work().calibrate  # no backward pass


def test_a_layer_at_a_time_with_gradients_the_forward_pass_is_computed_once_more() -> None:
    """Of three passes in place of two, and the moments are as they were."""
    assert 1.3 < work(by_layer=True).calibrate / work().calibrate < 1.5
    assert work(by_layer=True).solve == work().solve
    assert work("forward", by_layer=True) == work("forward")


def test_the_weights_that_a_token_meets_are_those_of_a_forward_pass(tmp_path) -> None:
    """torch counts the operations of the model itself."""
    from torch.utils.flop_counter import FlopCounterMode

    from mla_convert.duration import forward_operations

    model = tiny_llama(tied=True)
    source = open_source(str(save_source(model, tmp_path))).spec
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.set_attn_implementation("eager")
        model(torch.zeros(1, 64, dtype=torch.long))
    # all of torch's are products with weights or scores; it counts the few of the rotary angles too
    assert 64 * forward_operations(source, 64) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_of_experts_those_that_answer_count() -> None:
    block = BlockSpec(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=1536)
    mixed = replace(spec(), block=block)
    more = replace(mixed, block=replace(block, num_experts=64))
    assert work(source=more).calibrate < 1.05 * work(source=mixed).calibrate  # the router's rows
    twice = replace(mixed, block=replace(block, num_experts_per_tok=4))
    assert work(source=twice).calibrate > 1.2 * work(source=mixed).calibrate


def test_what_a_recipe_leaves_out_takes_no_time() -> None:
    assert work("exact").calibrate == 0
    assert (work().refit, work().heal) == (0, 0)
    assert work("fast").refit > 0
    assert work("best").heal > work("balanced").heal > 0
    given = work("best", calibrated=True)
    assert given.calibrate == 0
    assert given.total == pytest.approx(work("best").total - work("best").calibrate)


def test_the_rate_is_one_that_a_cpu_can_have() -> None:
    assert 1e8 < matmul_rate(0.01) < 1e14
