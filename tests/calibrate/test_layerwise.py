"""Calibration a layer at a time: the sums of a whole model's, from any point at which it was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mla_convert.calibrate.collect import collect
from mla_convert.calibrate.layerwise import collect_layerwise
from mla_convert.calibrate.rows import RowFile
from mla_convert.calibrate.statistics import Provenance, StoredLayers
from mla_convert.errors import OutputError, SourceError
from mla_convert.sources import Source, open_source
from mla_convert.sources.streamed import StreamedDecoder
from tests.calibrate.models import same_sums
from tests.tiny import VOCAB_SIZE, save_source, tiny_gemma3, tiny_llama, tiny_qwen2
from tests.tiny_families import tiny_bloom, tiny_gpt2, tiny_mixtral

MODELS = {
    "llama": tiny_llama,
    "qwen2-window": lambda: tiny_qwen2(window=8),
    "gemma3": tiny_gemma3,
    "gpt2": tiny_gpt2,
    "bloom": tiny_bloom,
    "mixtral": tiny_mixtral,
}
LENGTH = 24


@pytest.fixture(scope="module", params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(str(save_source(MODELS[request.param](), tmp_path_factory.mktemp("source"))))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(str(save_source(tiny_llama(num_hidden_layers=4), tmp_path_factory.mktemp("llama"))))


def contexts(count: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB_SIZE, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def provenance(**changes: Any) -> Provenance:
    given: dict[str, Any] = {
        "source_digests": {},
        "text_ref": "",
        "text_digest": "",
        "tokens": 0,
        "context": LENGTH,
        "seed": 3,
        "gradients": False,
    }
    return Provenance(**given | changes)


def layerwise(source: Source, folder: Path, count: int = 10, noise: Tensor | None = None, **how: Any) -> StoredLayers:
    return collect_layerwise(
        [StreamedDecoder(source)], source.spec, contexts(count), provenance(**how), folder, noise=noise
    )


def same(found: Any, expected: Any) -> None:
    """To what another order of float32 sums leaves."""
    same_sums(found, expected, rtol=1e-4, atol=1e-5, numbers=1e-5)


@pytest.mark.parametrize("how", ["forward", "gradients", "held out"])
def test_the_sums_are_those_of_the_whole_model(source: Source, tmp_path: Path, how: str) -> None:
    options = {"gradients": how != "forward", "held_out": how == "held out"}
    noise = contexts(2, seed=9)
    found = layerwise(source, tmp_path, noise=noise, **options)
    expected = collect(
        source.load_decoder(dtype=torch.float32), source.spec, contexts(10), seed=3, noise=noise, **options
    )
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        same(mine, theirs)


def test_hidden_states_are_gone_when_it_is_done(llama: Source, tmp_path: Path) -> None:
    layerwise(llama, tmp_path, gradients=True)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["calibration.json", *(f"statistics.{i:05d}.safetensors" for i in range(4))]


def test_hidden_states_of_another_text_are_not_taken_up(llama: Source, tmp_path: Path) -> None:
    def stop(_stage: str, done: int, _total: int) -> None:
        if done > 45:
            raise KeyboardInterrupt

    how = provenance(gradients=True)
    with pytest.raises(KeyboardInterrupt):
        collect_layerwise([StreamedDecoder(llama)], llama.spec, contexts(10), how, tmp_path / "one", progress=stop)
    other = provenance(gradients=True, text_digest="another")
    texts = contexts(10, seed=1)
    found = collect_layerwise([StreamedDecoder(llama)], llama.spec, texts, other, tmp_path / "one")
    expected = collect_layerwise([StreamedDecoder(llama)], llama.spec, texts, other, tmp_path / "two")
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.key_value, theirs.key_value)


def test_forward_only_never_holds_the_states_of_more_than_two_layers(llama: Source, tmp_path: Path) -> None:
    most = 0

    def look(_stage: str, _done: int, _total: int) -> None:
        nonlocal most
        most = max(most, len(list(tmp_path.glob("hidden.*"))))

    collect_layerwise([StreamedDecoder(llama)], llama.spec, contexts(3), provenance(), tmp_path, progress=look)
    assert most == 2


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("after", [0, 3, 13, 29, 41, 60])
def test_a_run_that_was_stopped_goes_on_to_the_same_sums(
    llama: Source, tmp_path: Path, gradients: bool, after: int
) -> None:
    """Stopped after so many of the 40 or 80 contexts and layers; files are never written twice under their names."""
    whole = layerwise(llama, tmp_path / "whole", gradients=gradients)
    total = 80 if gradients else 40
    if after >= total:
        pytest.skip("it is done by then")

    def stop(_stage: str, done: int, of: int) -> None:
        assert of == total
        if done > after:
            raise KeyboardInterrupt

    folder = tmp_path / "stopped"
    how = provenance(gradients=gradients)
    with pytest.raises(KeyboardInterrupt):
        collect_layerwise([StreamedDecoder(llama)], llama.spec, contexts(10), how, folder, progress=stop)
    assert not list(folder.glob("*.partial-*"))
    seen: list[int] = []
    found = collect_layerwise(
        [StreamedDecoder(llama)], llama.spec, contexts(10), how, folder,
        progress=lambda _stage, done, _total: seen.append(done),
    )  # fmt: skip
    for i in range(4):
        mine, theirs = (load_file(stored.path(i)) for stored in (found, whole))
        assert all(torch.equal(mine[name], theirs[name]) for name in mine.keys() | theirs.keys())
    assert seen[-1] == total
    assert len(seen) <= total - after // 10 * 10  # layers that were done are not computed again


def test_statistics_of_another_text_are_not_taken_up(llama: Source, tmp_path: Path) -> None:
    layerwise(llama, tmp_path, text_digest="one")
    again = layerwise(llama, tmp_path, count=4, text_digest="two")
    assert again[0].tokens == 4 * LENGTH


def test_activations_that_are_not_finite_name_their_layer(tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0] = 1e38
    source = open_source(str(save_source(model, tmp_path / "source")))
    with pytest.raises(SourceError, match="layer 1"):
        layerwise(source, tmp_path / "work")


def test_rows_come_back_from_their_places(tmp_path: Path) -> None:
    rows = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    file = RowFile(tmp_path / "rows", (3, 5, 7))
    assert not file.complete
    with file.writing() as writer:
        for i in (2, 0, 1):
            writer.write(i, rows[i : i + 1])
    assert file.complete
    for i in range(3):
        assert torch.equal(file.read(i), rows[i : i + 1])
    (tmp_path / "rows").write_bytes((tmp_path / "rows").read_bytes()[:-1])
    assert not file.complete
    with pytest.raises(OutputError, match="ends too early"):
        file.read(2)


def test_no_layer_that_is_done_is_held_on_to(llama: Source, tmp_path: Path) -> None:
    """Neither its weights nor its moments."""
    decoder = StreamedDecoder(llama)
    collect_layerwise([decoder], llama.spec, contexts(3), provenance(gradients=True), tmp_path)
    assert all(parameter.is_meta for parameter in decoder.model.parameters())
    for layer in decoder.model.model.layers:
        assert not hasattr(layer.self_attn, "calibration_recorder")
