"""Refits in a conversion: what changes nothing, what lowers the errors, and that it is done once and recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from mla_convert import calibration, convert_layers
from mla_convert.calibrate.collect import collect
from mla_convert.errors import TextError, UsageError
from mla_convert.evaluate import load_for_evaluation
from mla_convert.pipeline import ConvertRequest, convert
from mla_convert.recipe import RefitRecipe, load_recipe
from mla_convert.refit import ConvertedAttention, LayerRefit, refit_layers
from mla_convert.sources import Source, open_source
from mla_convert.spec import MLAShape
from mla_convert.transform import convert_layer
from tests.calibrate.models import contexts
from tests.tiny import HEAD_DIM, save_source, tiny_llama, tiny_mistral, tiny_olmo2, tiny_qwen2

LAYERS = 3
KINDS = {
    "gqa": lambda: tiny_llama("GQA", num_hidden_layers=LAYERS),
    "bias": lambda: tiny_llama("GQA", bias=True, num_hidden_layers=LAYERS),
    "window": lambda: tiny_mistral(window=6, num_hidden_layers=LAYERS),
    "qwen2": lambda: tiny_qwen2(window=6, num_hidden_layers=LAYERS),
    "norms": lambda: tiny_olmo2(num_hidden_layers=LAYERS),
    "yarn": lambda: tiny_llama(
        "GQA",
        num_hidden_layers=LAYERS,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def opened(request, tmp_path_factory) -> Source:
    """Each of the sources in turn."""
    return open_source(str(save_source(KINDS[request.param](), tmp_path_factory.mktemp("refit") / "source")))


class Walk:
    """A source, contexts of tokens, its statistics over them, and the layers that a walk converted."""

    def __init__(self, source: Source, shape: MLAShape) -> None:
        self.source, self.shape = source, shape
        self.recipe = load_recipe("default")
        self.contexts = contexts(24, length=24)
        model = source.load_decoder(dtype=torch.float32)
        self.statistics = collect(model, source.spec, self.contexts, gradients=True, seed=0)

    def convert(self, i: int, refit: LayerRefit) -> Any:
        spec, attention = self.source.spec, refit.source(self.source.attention(i))
        weights = convert_layer(attention, self.statistics[i], spec.rope, self.shape, self.recipe).weights
        return refit.converted(weights)

    def refits(self, **changes: Any) -> tuple[LayerRefit, ...]:
        recipe = RefitRecipe(**{"tokens": 1, "inputs": 0.0, "outputs": 0.0} | changes)
        return tuple(refit for refit, _ in refit_layers(self.source, self.contexts, recipe, self.convert))

    def attention_errors(self, refits: tuple[LayerRefit, ...]) -> list[float]:
        """Each layer's Σ w ‖a_S - a_T‖² / Σ w ‖a_T‖², from two whole models run at once with hooks."""
        teacher, student = (self.source.load_decoder(dtype=torch.float32) for _ in range(2))
        for i, refit in enumerate(refits):
            student.model.layers[i].self_attn = ConvertedAttention(self.convert(i, refit), self.source.spec)
        seen: dict[str, list[Tensor]] = {"wanted": [], "found": [], "hidden": []}
        for model, name in ((teacher, "wanted"), (student, "found")):
            for layer in model.model.layers:
                layer.self_attn.register_forward_hook(lambda _m, _i, out, name=name: seen[name].append(out[0].double()))
        for layer in teacher.model.layers:
            layer.register_forward_pre_hook(lambda _m, given: seen["hidden"].append(given[0].double()))
        with torch.no_grad():
            teacher(self.contexts, use_cache=False)
            student(self.contexts, use_cache=False)
        errors = []
        streams = zip(seen["wanted"], seen["found"], seen["hidden"], teacher.model.layers, strict=True)
        for wanted, found, hidden, layer in streams:
            added = layer.added(wanted.float()).double()
            energy = (hidden + added).square().sum(-1)
            weight = (energy.median() / energy).clamp_max(4.0) * added.square().sum(-1) / wanted.square().sum(-1)
            lost, whole = ((x.square().sum(-1) * weight).sum() for x in (found - wanted, wanted))
            errors.append((lost / whole).item())
        return errors


@pytest.fixture(scope="module")
def walk(opened: Source) -> Walk:
    """At half the cache."""
    return Walk(opened, MLAShape(24, 8, HEAD_DIM, HEAD_DIM))


def largest_change(refits: tuple[LayerRefit, ...], walk: Walk) -> float:
    """Of any number of the source's weights, as a share of the largest in its matrix; 0 where nothing is refitted."""
    changes = [0.0]
    for i, refit in enumerate(refits):
        source = walk.source.attention(i)
        now, w_o = refit.source(source), refit.converted(walk.convert(i, LayerRefit())).w_o
        pairs = [(now.w_k, source.w_k), (now.w_v, source.w_v), (w_o, source.w_o)]
        pairs += [(a, b) for a, b in ((now.b_k, source.b_k), (now.b_v, source.b_v)) if a is not None and b is not None]
        changes += [((a.double() - b.double()).abs().max() / b.abs().max()).item() for a, b in pairs]
    return max(changes)


def test_at_a_large_ridge_nothing_changes(walk: Walk) -> None:
    assert largest_change(walk.refits(inputs=1e12, outputs=1e12), walk) <= 1e-7  # kept in float32


@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_where_the_student_is_the_source_nothing_changes(opened: Source, ridge: float) -> None:
    """At full size, where the streams differ by the rounding of float32 alone."""
    full = 2 * HEAD_DIM
    walk = Walk(opened, MLAShape(full, full, HEAD_DIM, HEAD_DIM))
    refits = walk.refits(inputs=ridge, outputs=ridge)
    # the streams differ by some 1e-6 after three layers; errors are squares
    assert largest_change(refits, walk) <= 1e-5
    assert all(refit.error is not None and refit.error <= 1e-10 for refit in refits)


@pytest.mark.parametrize("changes", [{"outputs": 1e-4}, {"inputs": 1e-4}, {"inputs": 1e-4, "outputs": 1e-4}], ids=str)
def test_errors_of_the_attention_outputs_fall(walk: Walk, changes: dict[str, float]) -> None:
    before = walk.attention_errors((LayerRefit(),) * LAYERS)
    refits = walk.refits(**changes)
    after = walk.attention_errors(refits)
    assert [refit.error for refit in refits] == pytest.approx(after, rel=1e-3)
    assert refits[0].key_value is None  # its inputs are the source's
    if "outputs" in changes:
        assert all(now < 0.95 * then for now, then in zip(after, before, strict=True))
    else:
        assert after[0] == pytest.approx(before[0], rel=1e-3)
        assert all(now < 0.95 * then for now, then in zip(after[1:], before[1:], strict=True))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save_source(tiny_llama(num_hidden_layers=LAYERS), tmp_path_factory.mktemp("refit-source") / "source")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("refit-text") / "text.txt"
    file.write_text("".join(f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(120)))
    return file


@pytest.fixture
def recipe_file(tmp_path: Path) -> Callable[..., str]:
    """The default recipe with a section of refits or other changes, in contexts that tiny texts fill."""

    def write(name: str = "refit", damping: Any = 0.1, **refit: float) -> str:
        content = load_recipe("default").to_dict()
        content["calibration"] = {"tokens": 2048, "context": 64}
        content["factorise"]["damping"] = damping
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(content | ({"refit": refit} if refit else {})))
        return str(file)

    return write


@pytest.fixture
def request_for(source: Path, text: Path, tmp_path: Path) -> Callable[..., ConvertRequest]:
    def make(**changes: Any) -> ConvertRequest:
        fields = {"source": str(source), "out": tmp_path / "out", "kv_rank": 20, "rope_dim": 8}
        return ConvertRequest(**fields | {"calibration": (str(text),)} | changes)

    return make


def output_errors(folder: Path, source: Path, ids: Tensor) -> list[float]:
    """Each layer's relative error of the attention output, unweighted, in whole models."""
    outputs = []
    for ref in (source, folder):
        model, _ = load_for_evaluation(str(ref), torch.float32)
        seen: list[Tensor] = []
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out[0]))
        with torch.no_grad():
            model(ids, use_cache=False)
        outputs.append(seen)
    return [((b - a).square().sum() / a.square().sum()).item() for a, b in zip(*outputs, strict=True)]


@pytest.mark.parametrize("format", ["native", "deepseek"])
def test_a_conversion_with_refits_is_nearer_to_its_source(
    request_for, recipe_file, source, text, tmp_path, format
) -> None:
    tokenizer = open_source(str(source)).load_tokenizer()
    ids = torch.tensor(tokenizer(text.read_text(), add_special_tokens=False)["input_ids"][:2048]).view(-1, 64)
    plain = convert(request_for(recipe=recipe_file("plain"), out=tmp_path / "plain", format=format))
    stages: list[tuple[str, int, int]] = []
    how = recipe_file(inputs=0.001, outputs=0.001)
    record = convert(request_for(recipe=how, format=format), lambda *call: stages.append(call))
    before, after = (output_errors(tmp_path / name, source, ids) for name in ("plain", "out"))
    assert all(now < then for now, then in zip(after, before, strict=True))
    assert [call for call in stages if call[0] == "refit"] == [("refit", i, LAYERS) for i in (1, 2, 3)]
    assert record["verification"]["max_logit_difference"] <= 1e-4
    assert record["recipe"]["refit"] == {"tokens": 16384, "inputs": 0.001, "outputs": 0.001}
    digest = hashlib.sha256(text.read_bytes()).hexdigest()
    assert record["refit"] == {"ref": str(text), "digest": digest, "tokens": record["refit"]["tokens"]}
    assert record["refit"]["tokens"] > 2048  # all that the text has, where the recipe asks for more
    assert record["timings"].keys() == plain["timings"].keys()
    assert record["seeds"] == {"calibration": 0, "refit": 0}
    assert all(0 < layer["attention"] < 1 for layer in record["layer_errors"])
    assert "Refits: " in (tmp_path / "out" / "README.md").read_text()
    assert plain["refit"] is None
    assert not any("attention" in layer for layer in plain["layer_errors"])


def test_ridges_of_zero_are_no_refit(request_for, recipe_file, tmp_path) -> None:
    convert(request_for(recipe=recipe_file("plain"), out=tmp_path / "plain"))
    record = convert(request_for(recipe=recipe_file(tokens=512)))
    assert record["refit"] is None
    same = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "out"))
    assert len(set(same)) == 1


def test_the_walk_is_made_once_and_its_text_is_asked_for_with_saved_statistics_too(
    request_for, recipe_file, tmp_path, monkeypatch
) -> None:
    walks: list[int] = []
    refit = convert_layers.refit_layers

    def counted(*arguments: Any, **options: Any) -> Any:
        walks.append(arguments[1].numel())
        return refit(*arguments, **options)

    monkeypatch.setattr(convert_layers, "refit_layers", counted)
    file, how = tmp_path / "kept.st", recipe_file(tokens=1024, outputs=0.01)
    convert(request_for(recipe=how, save_statistics=file))
    assert walks == [1024]
    again = request_for(recipe=how, out=tmp_path / "again", statistics=file)
    convert(again)
    stored = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "again")]
    assert all(torch.equal(value, stored[1][name]) for name, value in stored[0].items())
    with pytest.raises(TextError):
        convert(replace(again, out=tmp_path / "no", calibration=("./absent.txt",)))
    with pytest.raises(UsageError, match="refits on text"):
        convert(replace(again, out=tmp_path / "no", calibration=()))
    assert convert(replace(again, calibration_tokens=512, overwrite=True))["refit"]["tokens"] == 512
    assert walks == [1024, 1024, 512]


def test_an_interrupted_runs_calibration_serves_its_refits(request_for, recipe_file, tmp_path, monkeypatch) -> None:
    how = recipe_file(outputs=0.01, damping=[0.01, 1.0])
    convert(request_for(recipe=how, out=tmp_path / "straight"))

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "refit":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(request_for(recipe=how), stop)
    assert (tmp_path / ".out.calibration.safetensors").exists()
    monkeypatch.setattr(calibration, "collect", lambda *_: pytest.fail("calibrated again"))
    convert(request_for(recipe=how))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("straight", "out")]
    assert weights[0] == weights[1]


def test_the_dampings_chosen_are_recorded(request_for, recipe_file, tmp_path) -> None:
    kept = tmp_path / "kept.st"
    several = convert(request_for(recipe=recipe_file("several", damping=[0.003, 0.3]), save_statistics=kept))
    assert all(damping in (0.003, 0.3) for damping in several["dampings"])
    assert len(several["dampings"]) == LAYERS
    assert all(0 < layer["held_out"] < 1 for layer in several["layer_errors"])
    assert several["recipe"]["factorise"]["damping"] == [0.003, 0.3]
    for damping in (0.003, [0.003]):
        out = tmp_path / f"one-{type(damping).__name__}"
        one = convert(request_for(recipe=recipe_file("one", damping=damping), statistics=kept, out=out))
        assert one["dampings"] == [0.003] * LAYERS
        assert "held_out" not in one["layer_errors"][0]
    stored = [(tmp_path / f"one-{name}" / "model.safetensors").read_bytes() for name in ("float", "list")]
    assert stored[0] == stored[1]
