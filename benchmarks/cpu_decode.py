"""One attention layer on the CPU: absorbed against expanding each step and against the layer that was converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.cpu_layers import SOURCE_FORMS, LatentLayer, SourceLayer
from benchmarks.shapes import LayerShape
from benchmarks.timing import Eviction, Spread, cpu_clock, fastest, interleaved, ratio

BARS = {"expanding": 15.0, "source": 1.3, "source_fastest": 1.3}
# What transformers runs for one sequence without padding.
STOCK_FORM = "sdpa enable_gqa"
BAR_SHAPE, BAR_TOKENS = "Llama-3-8B H=32 C=512 R=64", 8192
# Three times the last-level cache of the processors that this is run on.
EVICTED_BYTES = 96 << 20


def measure_layers(
    shapes: tuple[LayerShape, ...], contexts: tuple[int, ...], threads: int, rounds: int, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Yield one result for every shape and context, for the whole layer and for its attention alone.

    In the ratios ``source`` attends as transformers does, ``source_fastest`` in the fastest of the forms tried here;
    ``forms`` holds the ratio to each.
    """
    before = torch.get_num_threads()
    evict = Eviction(EVICTED_BYTES)
    torch.set_num_threads(threads)
    try:
        for shape in shapes:
            for tokens in contexts:
                latent, source = LatentLayer(shape, tokens, dtype), SourceLayer(shape, tokens, dtype)
                calls = {"layer": _layer_calls(latent, source), "core": _core_calls(latent, source)}
                for part, named in calls.items():
                    yield _measure(shape, tokens, part, named, threads, rounds, evict)
    finally:
        torch.set_num_threads(before)


def _layer_calls(latent: LatentLayer, source: SourceLayer) -> dict[str, Callable[[], Any]]:
    forms = {form: (lambda form=form: source.step(form)) for form in SOURCE_FORMS}
    return {"absorbed": latent.absorbed, "expanding": latent.expanding, **forms}


def _core_calls(latent: LatentLayer, source: SourceLayer) -> dict[str, Callable[[], Any]]:
    forms = {form: source.core(form) for form in SOURCE_FORMS}
    return {"absorbed": latent.absorbed_core(), "expanding": latent.expanding_core(), **forms}


@torch.inference_mode()
def _measure(
    shape: LayerShape,
    tokens: int,
    part: str,
    calls: dict[str, Callable[[], Any]],
    threads: int,
    rounds: int,
    evict: Eviction,
) -> dict[str, Any]:
    clock, clock_name = cpu_clock(threads)
    seconds = interleaved(calls, rounds, clock, evict)
    best = fastest(seconds, list(SOURCE_FORMS))
    return {
        "shape": shape.label,
        "tokens": tokens,
        "part": part,
        "projections_included": part == "layer",
        "threads": threads,
        "rounds": rounds,
        "clock": clock_name,
        "milliseconds": {name: Spread.of(samples).scaled(1e3) for name, samples in seconds.items()},
        "stock_form": STOCK_FORM,
        "fastest_form": best,
        "ratios": {
            "expanding": ratio(seconds, "expanding", "absorbed").scaled(1),
            "source": ratio(seconds, STOCK_FORM, "absorbed").scaled(1),
            "source_fastest": ratio(seconds, best, "absorbed").scaled(1),
        },
        "forms": {form: ratio(seconds, form, "absorbed").scaled(1) for form in SOURCE_FORMS},
        "bytes_ratio": round(shape.source_numbers / shape.latent_numbers, 3),
    }


def bars(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each bar with what was measured against it, from the whole layer on one thread."""
    for result in results:
        wanted = (result["shape"], result["tokens"], result["part"], result["threads"])
        if wanted == (BAR_SHAPE, BAR_TOKENS, "layer", 1):
            return [
                {
                    "against": name,
                    "bar": bar,
                    "measured": result["ratios"][name],
                    "met": result["ratios"][name]["median"] >= bar,
                }
                for name, bar in BARS.items()
            ]
    return []
