"""Verification a layer at a time: it says what loading the whole folder says, and catches what is wrong with it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from mla_convert.errors import VerificationError
from mla_convert.export.layerwise import verify_layerwise
from mla_convert.export.reference import PaperAttention
from mla_convert.export.reload import ReloadCheck
from mla_convert.pipeline import ConvertRequest, convert
from mla_convert.recipe import load_recipe
from mla_convert.sources import Source, open_source
from mla_convert.spec import MLAShape
from mla_convert.transform import convert_layer
from tests.tiny import save_source, tiny_gemma3, tiny_llama, tiny_qwen2
from tests.tiny_families import tiny_bloom, tiny_gpt2, tiny_mixtral

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "qwen2-window": lambda: tiny_qwen2(window=8, tied=True),
    "gemma3": tiny_gemma3,
    "gpt2": tiny_gpt2,
    "bloom": tiny_bloom,
    "mixtral": tiny_mixtral,
}
IDS = torch.randint(2, 280, (1, 20), generator=torch.Generator().manual_seed(4))


class Written:
    """A source and its conversion at full rank, in a folder."""

    def __init__(self, model: PreTrainedModel, place: Path) -> None:
        self.source: Source = open_source(str(save_source(model, place / "source")))
        self.folder = place / "out"
        request = ConvertRequest(
            source=self.source.ref, out=self.folder, recipe="exact", dtype="float32", low_memory=True
        )
        self.record = convert(request)

    def weights(self, layer: int) -> Any:
        spec, shape = self.source.spec, MLAShape(**self.record["plan"]["layers"][layer])
        attention = self.source.attention(layer)
        return convert_layer(attention, None, spec.rope_of(layer), shape, load_recipe("exact")).weights

    def check(self, tolerance: float = 1e-3) -> ReloadCheck:
        return verify_layerwise(self.source, self.weights, self.folder, IDS, dtype=torch.float32, tolerance=tolerance)


@pytest.fixture(scope="module", params=MODELS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(MODELS[request.param](), tmp_path_factory.mktemp(request.param))


def test_a_conversion_in_little_memory_is_verified(written: Written) -> None:
    assert written.record["verification"]["max_logprob_difference"] <= 1e-4
    assert written.record["reading_difference"] is None
    assert written.check().max_logit_difference <= 2e-4


def test_both_ways_find_the_same_difference(written: Written, tmp_path: Path) -> None:
    """With a weight that is off in the folder: what transformers' own loading of it answers is what is found here."""
    stored = load_file(written.folder / "model.safetensors")
    name = "model.norm.weight"
    for file in written.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(stored | {name: stored[name] * 1.5}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)(IDS, use_cache=False).logits
        right = AutoModelForCausalLM.from_pretrained(written.folder)(IDS, use_cache=False).logits
    expected = (loaded.double().log_softmax(-1) - right.double().log_softmax(-1)).abs().max().item()
    assert expected > 0.01
    found = verify_layerwise(
        written.source, written.weights, tmp_path, IDS, dtype=torch.float32, tolerance=float("inf")
    )
    assert found.max_logprob_difference == pytest.approx(expected, rel=1e-2)
    with pytest.raises(VerificationError, match="answers differently"):
        verify_layerwise(written.source, written.weights, tmp_path, IDS, dtype=torch.float32, tolerance=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored.pop("model.layers.0.mlp.up_proj.weight"), "lacks model.layers.0.mlp.up_proj"),
        (lambda stored: stored.update({"model.more": torch.zeros(2)}), "model.more"),
        (lambda stored: stored.update({"model.norm.weight": torch.zeros(3)}), r"norm\.weight of .* is \[3\]"),
    ],
    ids=["missing", "left over", "shape"],
)
def test_tensors_that_are_not_the_classes_own_are_found(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    case = Written(tiny_llama(), tmp_path)
    stored = load_file(case.folder / "model.safetensors")
    change(stored)
    save_file(stored, case.folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerificationError, match=message):
        case.check()


def test_a_folder_that_answers_otherwise_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_convert.pipeline.VERIFY_TOLERANCE", {"float32": -1.0})
    source = save_source(tiny_llama(), tmp_path / "source")
    with pytest.raises(VerificationError):
        convert(ConvertRequest(source=str(source), out=tmp_path / "out", recipe="exact", low_memory=True))
    assert not (tmp_path / "out").exists()


def test_no_layer_that_was_compared_is_held_on_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in float64 would add up to more than the model."""
    made: list[weakref.ref[PaperAttention]] = []
    build = PaperAttention.__init__

    def counted(self: PaperAttention, *arguments: Any) -> None:
        gc.collect()
        assert not any(one() is not None for one in made)
        made.append(weakref.ref(self))
        build(self, *arguments)

    case = Written(tiny_llama(num_hidden_layers=4), tmp_path)
    monkeypatch.setattr(PaperAttention, "__init__", counted)
    case.check()
    assert len(made) == 4
