"""The layers of a conversion, each from its statistics, refitted or not, and kept in files as they are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from mla_convert.calibrate.statistics import LayerStatistics
from mla_convert.layer_store import LayerStore
from mla_convert.memory import release_freed_memory
from mla_convert.mla import MLAWeights
from mla_convert.plan import ConversionPlan
from mla_convert.progress import Progress, silent
from mla_convert.refit import LayerRefit, refit_layers
from mla_convert.sources import Source
from mla_convert.transform import ConvertedLayer, convert_layer


def convert_layers(
    source: Source,
    planned: ConversionPlan,
    statistics: Sequence[LayerStatistics] | None,
    counts: Sequence[int] | None,
    store: LayerStore,
    contexts: Int[Tensor, "n S"] | None = None,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Convert every layer that ``store`` does not hold, and keep it there.

    Args:
        counts: how many slots each pair holds, where the target prescribes it.
        contexts: what the recipe's refit runs over; None for no refit.
        device: where that computes.

    Raises:
        OutputError: a layer cannot be kept.
        StatisticsError: the recipe needs statistics that are not there.
    """
    progress, layers, recipe = progress or silent, source.spec.num_layers, planned.recipe

    def converted(i: int, refit: LayerRefit) -> ConvertedLayer:
        layer = convert_layer(
            refit.source(source.attention(i)),
            None if statistics is None else statistics[i],
            source.spec.rope_of(i),
            planned.layers[i],
            recipe,
            counts=counts,
        )
        return replace(layer, weights=refit.converted(layer.weights))

    first = 0
    while first < layers and store.load(first) is not None:
        first += 1
    if recipe.refit is None or contexts is None:
        for i in range(first, layers):
            store.save(i, converted(i, LayerRefit()))
            release_freed_memory()
            progress("convert", i + 1, layers)
        return
    if first == layers:
        return
    streams = store.load_streams(first)
    resume = None if streams is None else (first, streams)
    made: list[ConvertedLayer] = []

    def weights(i: int, refit: LayerRefit) -> MLAWeights:
        made[:] = [converted(i, refit)]
        return made[0].weights

    walk = refit_layers(source, contexts, recipe.refit, weights, progress, resume=resume, device=device)
    for i, (refit, after) in enumerate(walk, start=0 if resume is None else first):
        layer = made.pop()
        layer = replace(layer, weights=refit.converted(layer.weights), errors=dict(layer.errors) | refit.errors)
        # In this order a run that is stopped between any two finds the states before the first layer that is missing.
        store.save_streams(i + 1, after)
        store.save(i, layer)
        store.drop_streams(i)
