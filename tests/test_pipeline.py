"""The stages in order: what an interrupted run leaves, whose statistics are used, what is recorded; seeds hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mla_convert import calibration, pipeline
from mla_convert.calibrate.statistics import load_statistics
from mla_convert.errors import (
    FormatError,
    MLAConvertError,
    OutputError,
    PlanError,
    StatisticsError,
    TextError,
    UsageError,
    VerificationError,
)
from mla_convert.pipeline import ConvertRequest, convert, plan
from mla_convert.sources import Source
from tests.tiny import save_source, tiny_llama, tiny_mistral
from tests.tiny_families import tiny_gpt2

LEFT_OVER = ".out.calibration.safetensors"
LAYERS = ".out.layers"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save_source(tiny_llama(), tmp_path_factory.mktemp("pipeline") / "source")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("pipeline-text") / "text.txt"
    file.write_text("".join(f"Line {i}: the cat sat on mat {i * i} and saw {i % 7} dogs.\n" for i in range(120)))
    return file


@pytest.fixture
def request_for(source: Path, text: Path, tmp_path: Path) -> Callable[..., ConvertRequest]:
    def make(**changes: Any) -> ConvertRequest:
        fields: dict[str, Any] = {
            "source": str(source),
            "out": tmp_path / "out",
            "kv_rank": 20,
            "rope_dim": 8,
            "calibration": (str(text),),
            "calibration_tokens": 512,
        }
        return ConvertRequest(**fields | changes)

    return make


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Interrupted:
    """Within it, writing is interrupted as by Ctrl-C, after calibration."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def stop(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        self.context = monkeypatch.context()
        self.stop = stop

    def __enter__(self) -> None:
        patch = self.context.__enter__()
        patch.setattr(pipeline, "write_native", self.stop)

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)


@pytest.fixture
def collections(monkeypatch) -> list[int]:
    """Grows by one with each calibration."""
    seen: list[int] = []
    collect = calibration.collect

    def counted(*arguments: Any, **options: Any) -> Any:
        seen.append(len(arguments[2]))
        return collect(*arguments, **options)

    monkeypatch.setattr(calibration, "collect", counted)
    return seen


def test_the_calibration_of_an_interrupted_run_is_used_by_the_next(request_for, monkeypatch, tmp_path, collections):
    straight = tmp_path / "straight"
    convert(request_for(out=straight))
    with Interrupted(monkeypatch), pytest.raises(KeyboardInterrupt):
        convert(request_for())
    assert names(tmp_path) == [LEFT_OVER, LAYERS, "straight"]
    assert len(collections) == 2

    convert(request_for())
    assert len(collections) == 2
    assert names(tmp_path) == ["out", "straight"]
    assert weights(tmp_path / "out") == weights(straight)


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"calibration_tokens": 1024}, {"recipe": "forward"}],
    ids=str,
)
def test_a_calibration_for_something_else_is_not(request_for, monkeypatch, tmp_path, collections, changes) -> None:
    with Interrupted(monkeypatch), pytest.raises(KeyboardInterrupt):
        convert(request_for())
    convert(request_for(**changes))
    assert len(collections) == 2
    assert names(tmp_path) == ["out"]


def test_a_calibration_on_another_text_or_source_is_not(request_for, monkeypatch, tmp_path, collections, text) -> None:
    with Interrupted(monkeypatch), pytest.raises(KeyboardInterrupt):
        convert(request_for())
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("cat", "dog"))
    with Interrupted(monkeypatch), pytest.raises(KeyboardInterrupt):
        convert(request_for(calibration=(str(other),)))
    assert len(collections) == 2
    elsewhere = save_source(tiny_llama(seed=1), tmp_path / "elsewhere")
    convert(request_for(calibration=(str(other),), source=str(elsewhere)))
    assert len(collections) == 3


def test_a_damaged_calibration_is_made_again(request_for, monkeypatch, tmp_path, collections) -> None:
    with Interrupted(monkeypatch), pytest.raises(KeyboardInterrupt):
        convert(request_for())
    left = tmp_path / LEFT_OVER
    left.write_bytes(left.read_bytes()[:-50])
    convert(request_for())
    assert len(collections) == 2
    assert names(tmp_path) == ["out"]


def test_sizes_may_change_after_an_interruption(request_for, monkeypatch, collections) -> None:
    """Statistics do not depend on them."""
    with Interrupted(monkeypatch), pytest.raises(KeyboardInterrupt):
        convert(request_for())
    record = convert(request_for(kv_rank=10, rope_dim=4))
    assert len(collections) == 1
    assert record["plan"]["layers"][0]["kv_rank"] == 10


def test_interrupted_during_calibration_nothing_is_left(request_for, tmp_path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(request_for(), stop)
    assert names(tmp_path) == []


def test_a_folder_that_fails_its_verification_is_not_left(request_for, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(pipeline, "VERIFY_TOLERANCE", {"float32": 0.0})
    with pytest.raises(VerificationError):
        convert(request_for())
    assert names(tmp_path) == [LEFT_OVER, LAYERS]


def test_saved_statistics_convert_again_without_calibration(request_for, tmp_path, collections) -> None:
    file = tmp_path / "kept" / "statistics.safetensors"
    first = convert(request_for(save_statistics=file))
    again = convert(request_for(out=tmp_path / "again", statistics=file, calibration=("./absent.txt",), seed=9))
    assert len(collections) == 1
    assert weights(tmp_path / "again") == weights(tmp_path / "out")
    assert again["calibration"] == first["calibration"]
    assert again["seeds"] == {"calibration": 0}  # the seed that the statistics were made with
    kept = load_statistics(file)
    assert (kept.provenance.tokens, kept.provenance.gradients) == (512, True)
    assert file.exists()


def test_a_text_that_is_not_read_is_said_to_be(request_for, tmp_path, caplog) -> None:
    file = tmp_path / "statistics.safetensors"
    convert(request_for(save_statistics=file))
    assert not caplog.records
    convert(request_for(out=tmp_path / "again", statistics=file))
    assert ["--calibration is not read" in record.getMessage() for record in caplog.records] == [True]


def test_statistics_that_are_not_finite_are_refused(request_for, tmp_path) -> None:
    file = tmp_path / "statistics.safetensors"
    convert(request_for(save_statistics=file))
    stored = bytearray(file.read_bytes())
    stored[-64:-56] = b"\xff" * 8
    file.write_bytes(stored)
    with pytest.raises(StatisticsError, match="not finite"):
        convert(request_for(out=tmp_path / "no", statistics=file))
    assert not (tmp_path / "no").exists()


def test_where_statistics_cannot_be_kept_is_said_before_they_are_made(request_for, tmp_path, collections) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StatisticsError, match="cannot be written"):
        convert(request_for(save_statistics=tmp_path / "file" / "statistics.safetensors"))
    assert collections == []


def test_statistics_of_another_source_are_refused(request_for, tmp_path) -> None:
    file = tmp_path / "statistics.safetensors"
    convert(request_for(save_statistics=file))
    elsewhere = save_source(tiny_llama(seed=1), tmp_path / "elsewhere")
    with pytest.raises(StatisticsError, match="another source"):
        convert(request_for(source=str(elsewhere), out=tmp_path / "no", statistics=file))
    assert not (tmp_path / "no").exists()


def test_forward_statistics_serve_forward_recipes_alone(request_for, tmp_path, collections) -> None:
    file = tmp_path / "statistics.safetensors"
    convert(request_for(recipe="forward", save_statistics=file))
    convert(request_for(recipe="transmla", rope_dim=16, out=tmp_path / "real", statistics=file))
    assert len(collections) == 1
    with pytest.raises(StatisticsError, match="gradients"):
        convert(request_for(recipe="default", out=tmp_path / "no", statistics=file))


def test_damaged_statistics_are_refused_before_any_work(request_for, tmp_path, collections) -> None:
    file = tmp_path / "statistics.safetensors"
    file.write_bytes(b"not these")
    with pytest.raises(StatisticsError):
        convert(request_for(statistics=file))
    assert collections == []
    assert names(tmp_path) == ["statistics.safetensors"]


def test_the_same_seed_writes_the_same_bytes(request_for, tmp_path) -> None:
    for name, seed in (("one", 4), ("again", 4), ("other", 5)):
        torch.rand(3)  # the global generator is in another state each time
        convert(request_for(out=tmp_path / name, seed=seed))
    one, again, other = (tmp_path / name for name in ("one", "again", "other"))
    assert weights(one) == weights(again)
    assert weights(one) != weights(other)
    assert (one / "config.json").read_bytes() == (again / "config.json").read_bytes()


def test_shards_change_files_and_no_number(request_for, tmp_path) -> None:
    convert(request_for())
    convert(request_for(out=tmp_path / "sharded", max_shard_size="40KB"))
    whole = load_file(tmp_path / "out" / "model.safetensors")
    parts: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "sharded").glob("*.safetensors"):
        parts |= load_file(file)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_the_record_says_how_it_was_made(request_for, source, text, tmp_path) -> None:
    stages: list[tuple[str, int, int]] = []
    record = convert(request_for(seed=3), lambda *call: stages.append(call))
    assert json.loads((tmp_path / "out" / "conversion.json").read_text()) == record
    assert record["seeds"] == {"calibration": 3}
    assert record["calibration"] == {
        "ref": str(text),
        "digest": hashlib.sha256(text.read_bytes()).hexdigest(),
        "tokens": 512,
    }
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert digest in record["source"]["digests"].values()
    assert record["recipe"]["name"] == "default"
    assert record["plan"]["cache"]["numbers_per_token"] == 2 * 28
    assert record["plan"]["cache"]["bytes_per_token"] == 2 * 28 * 4
    assert len(record["layer_errors"]) == 2
    for errors in record["layer_errors"]:
        assert errors.keys() == {"keys", "values", "truncated", "moved"}
        assert all(0 < share < 1 for share in errors.values())
    assert record["timings"].keys() == {"read", "calibrate", "convert", "write", "verify"}
    assert 0 <= record["reading_difference"] <= 1e-4
    # float32 logits of order ten, computed by two implementations
    assert record["verification"]["max_logit_difference"] <= 1e-4
    assert record["libraries"]["torch"] == torch.__version__
    assert [stage for stage, done, total in stages if done == total] == ["calibrate", "convert", "write"]
    assert (tmp_path / "out" / "README.md").read_text().startswith("---\n")


def test_no_calibration_is_recorded_where_none_was_made(request_for, collections, monkeypatch) -> None:
    record = convert(request_for(recipe="exact", kv_rank=None, rope_dim=None, cache=1.0, calibration=()))
    assert collections == []
    assert record["calibration"] is None
    assert record["seeds"] == {}
    assert all(error == pytest.approx(0, abs=1e-12) for layer in record["layer_errors"] for error in layer.values())


def test_narrow_types_are_written_and_verified(request_for, tmp_path) -> None:
    record = convert(request_for(dtype="bfloat16"))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert record["dtype"] == "bfloat16"
    assert record["plan"]["cache"]["bytes_per_token"] == 2 * 28 * 2
    assert record["verification"]["top1_agreement"] > 0.9


def test_a_window_shorter_than_the_verification_text(request_for, tmp_path) -> None:
    windowed = save_source(tiny_mistral(window=5), tmp_path / "windowed")
    record = convert(request_for(source=str(windowed)))
    assert record["verification"]["tokens"] == 5
    assert record["verification"]["max_logit_difference"] <= 1e-4


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"dtype": "int8"}, UsageError),
        ({"max_shard_size": "many"}, MLAConvertError),
        ({"kv_rank": 1000}, PlanError),
        ({"kv_rank": None, "rope_dim": None, "cache": 2.0}, PlanError),
        ({"calibration": ("./absent.txt",)}, TextError),
        ({"devices": ("cpu", "gpu")}, UsageError),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_calibration(request_for, tmp_path, collections, changes, kind) -> None:
    with pytest.raises(kind) as caught:
        convert(request_for(**changes))
    assert caught.value.remedy
    assert collections == []
    assert names(tmp_path) == []


def test_an_output_that_exists_is_refused_before_calibration(request_for, tmp_path, collections) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError):
        convert(request_for())
    assert collections == []


def test_an_old_conversion_stays_until_the_new_one_is_whole(request_for, monkeypatch, tmp_path) -> None:
    convert(request_for())
    before = weights(tmp_path / "out")
    with Interrupted(monkeypatch), pytest.raises(KeyboardInterrupt):
        convert(request_for(overwrite=True, kv_rank=10))
    assert weights(tmp_path / "out") == before
    convert(request_for(overwrite=True, kv_rank=10))
    assert weights(tmp_path / "out") != before
    assert names(tmp_path) == ["out"]


def test_a_plan_reads_no_weights(request_for, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Source, "tensor", refuse)
    planned = plan(request_for())
    assert (planned.layers[0].kv_rank, planned.layers[0].rope_dim) == (20, 8)
    assert plan(replace(request_for(), kv_rank=None, rope_dim=None, cache=0.5)).ratio <= 0.5


@pytest.mark.parametrize("where", ["source", "statistics", "weights", "folder", "note"])
def test_nothing_that_a_run_reads_or_keeps_is_replaced(tmp_path: Path, where: str) -> None:
    out = tmp_path / "out"
    inside = {"source": out / "inner"}.get(where, tmp_path / "source")
    save_source(tiny_llama(), inside)
    weights = (inside / "model.safetensors").read_bytes()
    if where == "source":
        (out / "conversion.json").write_text("{}")
    note = tmp_path / "note.txt"
    note.write_text("mine")
    places = {"statistics": out / "kept.st", "weights": inside / "model.safetensors", "folder": tmp_path, "note": note}
    saved = places.get(where)
    request = ConvertRequest(str(inside), out, overwrite=True, calibration_tokens=64, save_statistics=saved)
    with pytest.raises(UsageError, match=r"lies in|exists and is not"):
        convert(request)
    assert (inside / "model.safetensors").read_bytes() == weights
    assert note.read_text() == "mine"
    assert not list(tmp_path.glob(".out*"))


def test_statistics_that_are_not_collected_cannot_be_saved(tmp_path: Path) -> None:
    source = str(save_source(tiny_llama(), tmp_path / "source"))
    with pytest.raises(UsageError, match="collects none"):
        convert(ConvertRequest(source, tmp_path / "out", recipe="exact", save_statistics=tmp_path / "kept.st"))


def test_what_a_stock_class_cannot_hold_is_said_before_sizes_are(tmp_path: Path) -> None:
    """GPT-2 has no RoPE dims to give, so that advice on their number would lead nowhere."""
    source = save_source(tiny_gpt2(), tmp_path / "source")
    with pytest.raises(FormatError, match="learned positions are added"):
        convert(ConvertRequest(source=str(source), out=tmp_path / "out", format="deepseek"))
