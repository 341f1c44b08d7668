"""A conversion that its disk has no room for is refused before it begins, and no other."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mla_convert.calibration import Places
from mla_convert.errors import OutputError
from mla_convert.pipeline import convert, plan
from mla_convert.request import ConvertRequest
from mla_convert.scratch import scratch, tokens_of
from mla_convert.sources import Source, open_source
from mla_convert.space import check_space
from tests.tiny import save_source, tiny_llama

TOKENS = 4096
Free = Callable[[float], None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_llama(num_hidden_layers=5, hidden_size=128, head_dim=32)
    return save_source(model, tmp_path_factory.mktemp("space") / "source")


@pytest.fixture
def asked(source: Path, tmp_path: Path) -> ConvertRequest:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(900)))
    return ConvertRequest(
        str(source), tmp_path / "place" / "out", overrides=("factorise.noise=0",), cache=0.5, calibration=(str(text),),
        calibration_tokens=TOKENS, low_memory=True,
    )  # fmt: skip


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    """Say how many bytes every disk has free."""

    def say(size: float) -> None:
        usage = SimpleNamespace(total=10**15, used=0, free=int(size))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    return say


def sizes(asked: ConvertRequest) -> tuple[int, int, int]:
    """Bytes of the output's tensors, and of what lies beside it while it is written and while calibration goes on."""
    planned = plan(asked)
    kept = scratch(planned, tokens_of(planned, asked.calibration_tokens), by_layer=bool(asked.low_memory))
    out = dataclasses.replace(asked, out=asked.out.with_name("weighed"), recipe="default", low_memory=False)
    convert(out)
    file = out.out / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    written = file.stat().st_size - header
    shutil.rmtree(out.out)
    return written, kept.writing, kept.calibrating()


def check(asked: ConvertRequest) -> None:
    check_space(asked, plan(asked), open_source(asked.source))


def refused(asked: ConvertRequest) -> OutputError:
    with pytest.raises(OutputError) as caught:
        check(asked)
    return caught.value


def test_the_output_alone_does_not_fit(asked: ConvertRequest, free: Free, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight is read, and nothing is made."""
    written, _, _ = sizes(asked)

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Source, "tensor", refuse)
    free(0.9 * written)
    place = asked.out.parent
    shutil.rmtree(place)
    with pytest.raises(OutputError) as caught:
        convert(asked)
    assert f"{place.parent} has {0.9 * written / 1e9:.4g} GB free" in caught.value.message
    assert "the output takes 0.00" in caught.value.message
    assert "free some disk space" in caught.value.remedy
    assert "--dtype bfloat16" in caught.value.remedy
    assert not place.exists()
    free(0.45 * written)
    assert "--dtype" not in refused(dataclasses.replace(asked, dtype="bfloat16")).remedy


def test_the_output_fits_but_not_what_lies_beside_it(asked: ConvertRequest, free: Free) -> None:
    whole = dataclasses.replace(asked, low_memory=False)
    written, beside, _ = sizes(whole)
    free(written + 0.9 * beside)
    found = refused(whole)
    assert "the output takes" in found.message
    assert "kept beside it until it is written" in found.message
    assert "--calibration-tokens" not in found.remedy  # sums are as large of any text
    free(written + beside)
    check(whole)


def test_hidden_states_of_a_calibration_a_layer_at_a_time_do_not_fit(asked: ConvertRequest, free: Free) -> None:
    written, beside, calibrating = sizes(asked)
    assert written + beside < 0.9 * calibrating
    free(0.95 * calibrating)
    found = refused(asked)
    assert "what calibration keeps takes" in found.message
    assert "--calibration-tokens" in found.remedy
    free(calibrating)
    check(asked)
    free(0.95 * calibrating)
    check(dataclasses.replace(asked, low_memory=False))
    check(dataclasses.replace(asked, calibration_tokens=TOKENS // 2))


def test_a_text_that_has_fewer_tokens_is_counted(asked: ConvertRequest, free: Free) -> None:
    _, _, calibrating = sizes(asked)
    many = dataclasses.replace(asked, calibration_tokens=10**6)
    free(0.05 * calibrating * 10**6 / TOKENS)
    refused(dataclasses.replace(many, calibration=()))  # the built-in text has them
    check(many)


def test_what_an_interrupted_run_has_left_takes_no_more_room(asked: ConvertRequest, free: Free) -> None:
    written, _, calibrating = sizes(asked)

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "convert" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(asked, progress)
    places = Places.beside(asked.out)
    left = sum(file.stat().st_size for file in places.layers.iterdir())
    assert written + left < calibrating
    planned = plan(asked)
    ends = written + scratch(planned, tokens_of(planned, TOKENS), by_layer=True).writing
    free(1.02 * (ends - left))  # enough to go on, and far from enough to begin anew
    check(asked)
    free(0.9 * (ends - left))
    refused(asked)
    free(1.02 * (ends - left))
    places.clear()
    refused(asked)


def test_what_a_killed_run_was_writing_gives_its_room_back(asked: ConvertRequest, free: Free) -> None:
    written, _, calibrating = sizes(asked)
    staged = asked.out.with_name(f".{asked.out.name}.partial-1234-abcd")
    free(0.9 * written)
    refused(asked)
    staged.mkdir(parents=True)
    (staged / "model.safetensors").write_bytes(bytes(calibrating))
    found = refused(asked)  # while it calibrates that is still there
    assert "what calibration keeps" in found.message
    check(dataclasses.replace(asked, recipe="exact", overrides=(), cache=1.0))  # which does not calibrate


def test_a_disk_that_does_not_say_refuses_nothing(asked: ConvertRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(shutil, "disk_usage", fail)
    check(asked)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, used=0, free=0))
    check(asked)
