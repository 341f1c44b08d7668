"""What lies beside an output until it is written, against what conversions really left there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mla_convert.calibrate.rows import RowFile
from mla_convert.calibration import Places
from mla_convert.layer_store import LayerStore
from mla_convert.pipeline import convert, plan
from mla_convert.plan import make_plan
from mla_convert.recipe import load_recipe
from mla_convert.request import ConvertRequest
from mla_convert.scratch import Scratch, scratch, tokens_of
from tests.test_features import PLAIN
from tests.tiny import save_source, tiny_llama

TOKENS = 4096
# Headers of files, and norms: their share is that large of tiny files alone.
NEAR = 0.03


def held(places: Places) -> int:
    """Bytes of the files there."""
    files = [places.statistics, *places.layers.glob("*")]
    return sum(file.stat().st_size for file in files if file.is_file())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_llama(num_hidden_layers=5, hidden_size=128, head_dim=32)
    return save_source(model, tmp_path_factory.mktemp("scratch") / "source")


@pytest.fixture
def request_of(source: Path, tmp_path: Path) -> Callable[..., ConvertRequest]:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(900)))

    def make(recipe: str, low_memory: bool, *overrides: str) -> ConvertRequest:
        return ConvertRequest(
            str(source), tmp_path / "out", recipe, overrides, cache=0.5, calibration=(str(text),),
            calibration_tokens=TOKENS, low_memory=low_memory,
        )  # fmt: skip

    return make


def expected(request: ConvertRequest) -> Scratch:
    planned = plan(request)
    return scratch(planned, tokens_of(planned, TOKENS), by_layer=bool(request.low_memory))


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize(
    ("recipe", "override"),
    [
        ("forward", "factorise.damping=0.1"),  # as it is
        ("default", "factorise.noise=0"),  # gradients of noise are holes of a file
        ("default", "factorise.damping=[0.01, 0.1]"),  # with contexts held out
        ("fast", "factorise.noise=0"),
    ],
)
def test_it_is_what_a_conversion_leaves_at_most(
    monkeypatch: pytest.MonkeyPatch, request_of: Callable[..., ConvertRequest], recipe: str, override: str,
    low_memory: bool,
) -> None:  # fmt: skip
    """Looked at whenever something is about to go: what lies there only grows in between."""
    overrides = (override,) if "noise" in override else (override, "factorise.noise=0")
    asked = request_of(recipe, low_memory, *(("factorise.noise=1.0",) if recipe == "forward" else overrides))
    places, most = Places.beside(asked.out), {"calibrate": 0, "convert": 0, "write": 0}

    def look(stage: str) -> None:
        most[stage] = max(most[stage], held(places))

    def before(owner: type, name: str, stage: str) -> None:
        real = getattr(owner, name)

        def looking(*arguments: object) -> None:
            look(stage)
            real(*arguments)

        monkeypatch.setattr(owner, name, looking)

    before(RowFile, "remove", "calibrate")
    before(LayerStore, "drop_streams", "convert")

    def progress(stage: str, done: int, total: int) -> None:
        if stage in most and not (low_memory and stage == "calibrate"):
            look(stage)

    convert(asked, progress)
    kept = expected(asked)
    assert most["write"] == pytest.approx(kept.writing, rel=NEAR)
    assert most["convert"] == pytest.approx(kept.converting, rel=NEAR)
    if low_memory:
        assert most["calibrate"] == pytest.approx(kept.calibrating(), rel=NEAR)
    assert kept.most <= max(most.values())  # a conversion is refused by it


@pytest.mark.parametrize("done", [1, 3, 4])
def test_what_calibration_still_needs_shrinks_as_layers_are_done(
    request_of: Callable[..., ConvertRequest], done: int
) -> None:
    """A run that stops in the middle of its backward pass leaves what the rest of it begins with."""
    asked = request_of("default", True, "factorise.noise=0")
    contexts = TOKENS // 256

    def progress(stage: str, count: int, total: int) -> None:
        if count == (5 + done) * contexts + 1:  # the first context of the layer that comes then
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(asked, progress)
    kept = expected(asked)
    left = held(Places.beside(asked.out))
    assert left == pytest.approx((5 - done) * kept.hidden + kept.gradients + done * kept.statistics, rel=NEAR)
    assert left < kept.calibrating(done) <= kept.calibrating(done - 1) <= kept.calibrating()


def test_nothing_is_kept_of_what_is_not_collected() -> None:
    planned = make_plan(PLAIN, recipe=load_recipe("default"), cache=0.5)
    given = scratch(planned, tokens_of(planned), by_layer=True, calibrates=False)
    assert (given.statistics, given.hidden, given.gradients) == (0, 0, 0)
    assert given.most == given.converted > 0
    exact = make_plan(PLAIN, recipe=load_recipe("exact"), cache=1.0)
    assert scratch(exact, tokens_of(exact), by_layer=True).calibrating() == 0


def test_contexts_are_whole_and_each_text_has_its_own() -> None:
    planned = make_plan(replace(PLAIN, max_position_embeddings=4096), recipe=load_recipe("default"), cache=0.5)
    recipe = load_recipe("default").calibration
    assert recipe is not None
    assert tokens_of(planned).text == recipe.tokens
    found = tokens_of(planned, 1100)
    assert (found.context, found.text, found.noise, found.refit) == (512, 1024, 512, 0)
    shared = tokens_of(planned, 1100, texts=3)
    assert (shared.context, shared.text) == (366, 3 * 366)
