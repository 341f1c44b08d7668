"""Calibration that several devices share: the same sums as on one, whoever takes which context."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mla_convert.calibrate.accumulate import LayerAccumulator
from mla_convert.calibrate.collect import BACKWARD, collect
from mla_convert.calibrate.layerwise import collect_layerwise
from mla_convert.calibrate.parallel import on_each, shares
from mla_convert.calibrate.recorder import LayerRecorder
from mla_convert.calibrate.statistics import Provenance
from mla_convert.mla import MLAWeights
from mla_convert.pipeline import ConvertRequest
from mla_convert.pipeline import convert as convert_source
from mla_convert.plan import make_plan
from mla_convert.recipe import RefitRecipe, load_recipe
from mla_convert.refit import LayerRefit, refit_layers
from mla_convert.sources import open_source
from mla_convert.sources.streamed import StreamedDecoder
from mla_convert.transform import convert_layer
from tests.calibrate.models import Tiny, contexts, same_sums
from tests.one_device import one_device
from tests.tiny import save_source, tiny_gemma3, tiny_llama, tiny_qwen3
from tests.tiny_families import tiny_bloom

HOW = {
    "forward": {"gradients": False},
    "gradients": {"gradients": True},
    "held out": {"gradients": True, "held_out": True},
}


def same(found: Any, expected: Any) -> None:
    """To what another order of float64 sums leaves; gradients came through constants of such sums."""
    same_sums(found, expected, rtol=1e-6, atol=1e-7, numbers=1e-9)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
@pytest.mark.parametrize("devices", [2, 3])
def test_replicas_add_up_to_the_model(gqa: Tiny, devices: int, how: dict[str, bool]) -> None:
    options = {"seed": 3, "noise": contexts(2, seed=9), **how}
    expected = collect(gqa.model, gqa.spec, contexts(10), **options)
    replicas = [gqa.model, *(copy.deepcopy(gqa.model) for _ in range(devices - 1))]
    done: list[int] = []
    found = collect(replicas, gqa.spec, contexts(10), **options, progress=lambda stage, now, total: done.append(now))
    for mine, theirs in zip(found, expected, strict=True):
        same(mine, theirs)
    assert done == list(range(1, 13))


@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
def test_streamed_decoders_add_up_to_one(tmp_path: Path, how: dict[str, bool]) -> None:
    source = open_source(str(save_source(tiny_llama("GQA"), tmp_path / "source")))
    given = {"source_digests": source.digests(), "text_ref": "", "text_digest": "", "tokens": 140, "context": 14}
    provenance = Provenance(**given, seed=3, **how)
    found, expected = (
        collect_layerwise(
            [StreamedDecoder(source) for _ in range(count)],
            source.spec,
            contexts(10),
            provenance,
            tmp_path / str(count),
        )
        for count in (3, 1)
    )
    for mine, theirs in zip(found, expected, strict=True):
        same(mine, theirs)


def test_each_kind_of_context_is_dealt_out_in_turn() -> None:
    stages = [("pairs", 0), ("pairs", 1), ("held_out", 2), ("content", 3), ("content", 4), ("content", 5)]
    assert shares(stages, 2) == [
        [("pairs", 0), ("held_out", 2), ("content", 3), ("content", 5)],
        [("pairs", 1), ("content", 4)],
    ]
    assert shares(stages[:1], 2) == [[("pairs", 0)], []]


def test_one_that_fails_stops_the_others() -> None:
    stopped: list[bool] = []

    def work(device: int, stop: Event) -> None:
        if device == 0:
            raise ValueError("out of memory")
        stopped.append(stop.wait(timeout=60))

    with pytest.raises(ValueError, match="out of memory"):
        on_each(3, work)
    assert stopped == [True, True]


@pytest.mark.parametrize("stage", ["forward", "noise", "plain", "pairs", "content", "held_out"])
def test_what_is_computed_on_a_device_stays_there(gqa: Tiny, stage: str) -> None:
    """On the meta device, which has no numbers, under a check that refuses as a GPU does to compute with the CPU's."""
    spec, device, backward = gqa.spec, torch.device("meta"), stage in BACKWARD
    accumulator = LayerAccumulator(spec)
    accumulator.constants = torch.ones(spec.num_heads, spec.head_dim // 2, dtype=torch.complex128)
    recorder = LayerRecorder(spec, 0, 14, device, accumulator)
    recorder.begin(stage)
    query, key, value = (
        torch.empty(1, heads, 14, spec.head_dim, device=device, requires_grad=backward)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    with one_device():
        out = recorder.attend(query, key, value, torch.empty(1, 1, 14, 14, device=device), 1.0, None, None)
        assert out.device == device
        if backward:
            out.sum().backward()
            recorder.finish()
        with pytest.raises(RuntimeError, match="meet in"):  # so that the test could fail
            recorder.attend(query, key, value, torch.zeros(1, 1, 14, 14), 1.0, None, None)


FAMILIES = {
    "llama": lambda: tiny_llama("GQA", bias=True),
    "qwen3": tiny_qwen3,
    "gemma3": tiny_gemma3,
    "bloom": tiny_bloom,
}


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_streamed_run_stays_on_its_device(make: Callable[[], Any], tmp_path: Path) -> None:
    """Calibration with gradients, and refits of keys, values and outputs."""
    source = open_source(str(save_source(make(), tmp_path / "source")))
    given = {"source_digests": {}, "text_ref": "", "text_digest": "", "tokens": 84, "context": 14, "seed": 3}
    provenance = Provenance(**given, gradients=True)
    recipe = load_recipe("exact")
    plan = make_plan(
        source.spec, recipe=recipe, cache=1.0, kv_rank=None, rope_dim=None, format="native", stock_rope="default"
    )

    def convert(i: int, refit: LayerRefit) -> MLAWeights:
        layer = refit.source(source.attention(i))
        return convert_layer(layer, None, source.spec.rope_of(i), plan.layers[i], recipe).weights

    with one_device():
        decoder = StreamedDecoder(source, "meta")
        collect_layerwise([decoder], source.spec, contexts(6), provenance, tmp_path / "work", noise=contexts(2, seed=9))
        refit = RefitRecipe(tokens=84, inputs=0.1, outputs=0.1)
        for found, after in refit_layers(source, contexts(6), refit, convert, device="meta"):
            assert found.output is not None
            assert found.output.device == after[1].device == torch.device("cpu")


@pytest.mark.parametrize("low_memory", [False, True], ids=["whole", "low-memory"])
def test_a_conversion_on_two_devices_differs_by_rounding(tmp_path: Path, low_memory: bool) -> None:
    """Refits on the first of them included."""
    source, text = save_source(tiny_llama(), tmp_path / "source"), tmp_path / "text.txt"
    text.write_text("".join(f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(120)))
    made = []
    for name, devices in (("one", ()), ("two", ("cpu", "cpu"))):
        out = tmp_path / name
        convert_source(
            ConvertRequest(
                str(source), out, "fast", calibration=(str(text),), calibration_tokens=512,
                low_memory=low_memory, devices=devices,
            )
        )  # fmt: skip
        made.append(projections(out))
    assert len(made[0]) == 2
    for mine, theirs in zip(*made, strict=True):
        close = max((x - y).abs().max().item() for x, y in zip(mine, theirs, strict=True))
        assert close <= 1e-4


def projections(out: Path) -> list[list[torch.Tensor]]:
    """Each layer's products W_UK W_DKV, which no sign of a latent's channel changes, and W_O."""
    tensors, layers = load_file(out / "model.safetensors"), []
    while (down := tensors.get(f"model.layers.{len(layers)}.self_attn.kv_a_proj_with_mqa.weight")) is not None:
        up = tensors[f"model.layers.{len(layers)}.self_attn.kv_b_proj.weight"]
        layers.append([up @ down[: up.shape[1]], tensors[f"model.layers.{len(layers)}.self_attn.o_proj.weight"]])
    return layers
