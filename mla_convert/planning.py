"""What budgets of a source's cache give and take, put together: before any conversion, and without its calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mla_convert.allocate import predict
from mla_convert.budget import Budget, attention_costs, budget_facts, plan_budgets, sequence_bytes
from mla_convert.calibrate.statistics import load_statistics
from mla_convert.duration import conversion_work
from mla_convert.memory import fills_memory
from mla_convert.progress import Progress
from mla_convert.recipe import Recipe
from mla_convert.sources import Source
from mla_convert.speed import matmul_rate


@dataclass(frozen=True)
class Workload:
    """What a cache is to hold.

    Attributes:
        context: tokens of a sequence.
        batch: sequences.
        dtype: of the cache.
        memory: bytes that there are for it; None if that is not the question.
    """

    context: int
    batch: int
    dtype: str
    memory: int | None = None


def plan_facts(
    source: Source,
    recipe: Recipe,
    workload: Workload,
    statistics: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return what ``mla-convert plan --json`` prints.

    Args:
        statistics: of calibration, with gradients: with them the loss of each budget is predicted, and sizes that the
            recipe leaves to calibration are chosen.

    Raises:
        StatisticsError: the file cannot be read, is of another source, or holds no gradients.
    """
    spec, dtype, by_layer = source.spec, workload.dtype, fills_memory(source.num_weights())
    budgets = plan_budgets(spec, recipe)
    losses: Sequence[float | None] = (None,) * len(budgets)
    if statistics is not None:
        budgets, losses = _predicted(source, recipe, budgets, statistics, progress)
    near = min((b for b in budgets if b.plan is not None), key=lambda budget: abs(budget.share - 0.5), default=None)
    facts: dict[str, Any] = {
        "source": source.ref,
        "recipe": recipe.name,
        **asdict(workload),
        "windows": list(spec.windows),
        "low_memory": by_layer,
        "before": {
            "cached_per_token_layer": spec.kv_width,
            "cache_bytes_per_token": _per_token([spec.kv_width] * spec.num_layers, dtype),
            "weight_bytes": source.file_bytes(),
            **_held(source, [spec.kv_width] * spec.num_layers, workload),
        },
        "budgets": [],
        "attention": None,
        "time": None,
    }
    for budget, loss in zip(budgets, losses, strict=True):
        row = budget_facts(budget, source.file_bytes(), (dtype,), by_layer=by_layer, mapped=source.mapped())
        if budget.plan is not None:
            cached = [shape.cached for shape in budget.plan.layers]
            row |= {
                "kv_ranks": [shape.kv_rank for shape in budget.plan.layers],
                "rope_dims": [shape.rope_dim for shape in budget.plan.layers],
                "cache_bytes_per_token": _per_token(cached, dtype),
                **_held(source, cached, workload),
                "predicted_loss": loss,
            }
        facts["budgets"].append(row)
    if near is not None and near.plan is not None:
        costs = attention_costs(spec, near.plan.layers, dtype)
        facts["attention"] = {"cache": near.share, "kinds": [asdict(cost) for cost in costs]}
        facts["time"] = {"cache": near.share, **_time(near, statistics is not None, by_layer)}
    return facts


def _predicted(
    source: Source, recipe: Recipe, budgets: Sequence[Budget], file: Path, progress: Progress | None
) -> tuple[tuple[Budget, ...], tuple[float | None, ...]]:
    """The budgets with the sizes that a conversion would choose, and what each is predicted to cost."""
    found = load_statistics(file)
    found.check(source.digests(), source.spec, gradients=True, held_out=recipe.needs_held_out)
    plans = [budget.plan for budget in budgets if budget.plan is not None]
    predictions = iter(predict(plans, found.layers, source.attention, progress) if plans else ())
    settled: list[tuple[Budget, float | None]] = []
    for budget in budgets:
        if budget.plan is None:
            settled.append((budget, None))
            continue
        prediction = next(predictions)
        plan = replace(budget.plan, layers=prediction.layers, provisional=False)
        settled.append((replace(budget, plan=plan), prediction.loss))
    return tuple(budget for budget, _ in settled), tuple(loss for _, loss in settled)


def _per_token(cached: Sequence[int], dtype: str) -> int:
    return sequence_bytes(cached, [None] * len(cached), 1, dtype)


def _held(source: Source, cached: Sequence[int], workload: Workload) -> dict[str, Any]:
    each = sequence_bytes(cached, source.spec.windows, workload.context, workload.dtype)
    return {
        "cache_bytes": workload.batch * each,
        "sequences": None if workload.memory is None else workload.memory // each,
    }


def _time(budget: Budget, calibrated: bool, by_layer: bool) -> dict[str, Any]:
    """Seconds that the conversion is expected to take, by stage, and what that is worked out from."""
    assert budget.plan is not None
    work, rate = conversion_work(budget.plan, calibrated, by_layer=by_layer), matmul_rate()
    stages = {name: operations / rate for name, operations in asdict(work).items()}
    return {
        "seconds": sum(stages.values()),
        "stages": stages,
        "matmul_flops": rate,
        "threads": torch.get_num_threads(),
    }
