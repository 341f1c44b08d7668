"""Disks that fill up, vanish or cannot be written, and weights that are damaged: one message with a remedy, the exit
code of its kind, nothing under the final name, and nothing of the model touched.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_convert.errors import OutputError, SourceError
from mla_convert.export.folder import sole_run
from mla_convert.mla import MLAConfig
from mla_convert.sources import Source
from mla_convert.sources.safetensors_reader import SafetensorsCheckpoint
from tests.cli.conftest import Answer

Call = Callable[..., Answer]
WRITERS = ("convert", "export", "heal")
WEIGHTS = "model.safetensors"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Make a file system of so many bytes in memory; skip where that is not allowed."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = []

    def mount(options: str) -> Path:
        command = ["mount", *(["-t", "tmpfs"] if not mounted else []), "-o", options, "tmpfs", str(place)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system can be mounted: {error}")
        mounted.append(place)
        return place

    yield mount
    if mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # a failure's traceback may hold a file of it


@pytest.fixture
def write(cli: Call, tiny_folder: Path, converted: Path, text_file: Path) -> Callable[..., Answer]:
    """Run a command that writes a folder, from the tiny source or from its conversion unless given another."""

    def call(command: str, out: Path, model: Path | None = None) -> Answer:
        if command == "convert":
            text = ("--calibration", text_file, "--calibration-tokens", 1024)
            return cli(command, model or tiny_folder, out, "--cache", 0.5, *text, "--json")
        if command == "export":
            return cli(command, model or converted, out, "--target", "transformers", "--json")
        text = ("--text", text_file, "--tokens", 1024, "--context", 64, "--layer-steps", 2)
        return cli(command, model or converted, out, "--teacher", tiny_folder, *text, "--json")

    return call


def check(answer: Answer, kind: type, *said: str) -> None:
    """Assert one message with a remedy that says this, and nothing on standard output."""
    assert answer.code == kind.exit_code, answer.err
    message, remedy = answer.err.splitlines()
    assert message.startswith("error: ")
    assert remedy.startswith("  try: ")
    assert answer.out == ""
    assert [part for part in said if part not in answer.err] == []
    assert ".partial-" not in answer.err  # a folder that is gone by then


def unfinished(place: Path) -> list[str]:
    """What lies there other than what a run keeps to go on from: calibration, layers, checkpoints."""
    kept = (".out.calibration", ".out.layers", ".out.heal", ".out.stages")
    return [path.name for path in place.iterdir() if not path.name.startswith(kept)]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("left", ["for a part of the weights", "for all of the weights"])
def test_a_full_disk(write, disk, monkeypatch, tiny_folder, converted, tmp_path, command, left) -> None:
    """Each command first with room for everything, to know how much it writes; then with less.

    That a conversion will not fit is left to be found out here, as where something else fills the disk meanwhile.
    """
    monkeypatch.setattr("mla_convert.pipeline.check_space", lambda *_: None)
    assert write(command, tmp_path / "whole").code == 0
    weights = (tmp_path / "whole" / WEIGHTS).stat().st_size
    kept = 2 * weights if command != "export" else 0  # beside the output until it is there
    room = weights // 2 if left == "for a part of the weights" else weights + 8192
    place = disk(f"size={kept + room}")
    (place / "taken").write_bytes(bytes(kept))
    model = digests(tiny_folder), digests(converted)
    answer = write(command, place / "out")
    (place / "taken").unlink()
    assert answer.code in (OutputError.exit_code, 11), answer.err
    assert "space" in answer.err.splitlines()[1]
    assert unfinished(place) == []
    assert (digests(tiny_folder), digests(converted)) == model


@pytest.mark.parametrize("left", ["for a part of the weights", "for all of the weights"])
def test_a_conversion_that_will_not_fit_does_not_begin(write, disk, monkeypatch, tmp_path, left) -> None:
    """It says how much there is and how much it takes, reads no weight and makes no file."""
    assert write("convert", tmp_path / "whole").code == 0
    weights = (tmp_path / "whole" / WEIGHTS).stat().st_size
    place = disk(f"size={weights // 2 if left == 'for a part of the weights' else weights + 8192}")

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Source, "tensor", refuse)
    said = "the output takes" if left == "for a part of the weights" else "kept beside it until it is written"
    check(write("convert", place / "out"), OutputError, str(place), "GB", said, "free some disk space")
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("command", WRITERS)
def test_a_disk_that_cannot_be_written(write, disk, tiny_folder, command) -> None:
    place = disk("size=1m")
    disk("remount,ro")
    check(write(command, place / "out"), OutputError, "not writable")
    check(write(command, place / "new" / "out"), OutputError, "not writable")


def test_an_output_that_cannot_be_replaced_is_refused_before_any_work(cli, disk, converted, tiny_folder) -> None:
    place = disk("size=8m")
    shutil.copytree(converted, place / "out")
    disk("remount,ro")
    answer = cli("convert", tiny_folder, place / "out", "--cache", 0.5, "--overwrite")
    check(answer, OutputError, f"{place} is not writable")
    assert digests(place / "out") == digests(converted)


@pytest.mark.parametrize("command", WRITERS)
def test_an_output_that_vanishes_while_it_is_written(write, monkeypatch, tmp_path, command) -> None:
    """As a disk does that is pulled out. The library that writes the config makes the folder again."""
    place = tmp_path / "place"
    real = MLAConfig.save_pretrained

    def save(self: MLAConfig, folder: Path) -> None:
        shutil.rmtree(place)
        real(self, folder)

    if command == "heal":
        monkeypatch.setattr("mla_convert.heal.healing.model_card", lambda record: shutil.rmtree(place) or "")
    elif command == "export":
        monkeypatch.setattr("mla_convert.export.custom.DeepseekMLAConfig.save_pretrained", save)
    else:
        monkeypatch.setattr(MLAConfig, "save_pretrained", save)
    check(write(command, place / "out"), OutputError, "gone")
    assert not (place / "out").exists()


@pytest.mark.parametrize(("command", "kind"), [("convert", "convert"), ("export", "write"), ("heal", "heal")])
def test_two_runs_for_one_output(write, tmp_path, command, kind) -> None:
    with sole_run(tmp_path / "out", kind):
        check(write(command, tmp_path / "out"), OutputError, "another run is writing")
    assert list(tmp_path.iterdir()) == []


def test_absorbing_onto_a_full_disk_keeps_what_was_there(cli, disk, converted) -> None:
    place = disk("size=4m")
    shutil.copytree(converted, place / "mla")
    assert cli("absorb", place / "mla").code == 0
    before = digests(place / "mla")
    (place / "fill").write_bytes(bytes(shutil.disk_usage(place).free - 8192))
    check(cli("absorb", place / "mla", "--merge", "always"), OutputError, "absorbed.safetensors", "space")
    assert digests(place / "mla") == before


def test_absorbing_onto_a_disk_that_cannot_be_written(cli, disk, converted) -> None:
    place = disk("size=4m")
    shutil.copytree(converted, place / "mla")
    disk("remount,ro")
    check(cli("absorb", place / "mla"), OutputError, "absorbed.safetensors")


@pytest.mark.parametrize("command", ["export", "heal", "absorb"])
def test_a_model_whose_weights_are_cut_short(cli, write, converted, tmp_path, command) -> None:
    model = shutil.copytree(converted, tmp_path / "model")
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size - 1000)
    before = digests(model)
    answer = cli(command, model) if command == "absorb" else write(command, tmp_path / "out", model)
    check(answer, SourceError, str(model))
    assert digests(model) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def spoil(model: Path, name: str, number: float) -> None:
    """Put a number that is not finite at the end of a tensor."""
    tensors = load_file(model / WEIGHTS)
    tensors[name].view(-1)[-1] = number
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj", "input_layernorm"])
def test_a_source_with_a_weight_that_is_not_finite(write, tiny_folder, tmp_path, name, number) -> None:
    source = shutil.copytree(tiny_folder, tmp_path / "source")
    spoil(source, f"model.layers.1.{name}.weight", number)
    check(write("convert", tmp_path / "out", source), SourceError, f"model.layers.1.{name}.weight", "not a number")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("command", ["export", "heal", "absorb"])
def test_a_model_with_a_weight_that_is_not_finite(cli, write, converted, tmp_path, command) -> None:
    model, name = shutil.copytree(converted, tmp_path / "model"), "model.layers.1.self_attn.o_proj.weight"
    spoil(model, name, torch.nan)
    answer = cli(command, model) if command == "absorb" else write(command, tmp_path / "out", model)
    check(answer, SourceError, name, "not a number")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("change", ["written to", "replaced", "cut short", "removed"])
@pytest.mark.parametrize("command", ["convert", "export"])
def test_weights_that_change_while_they_are_read(
    write, monkeypatch, tiny_folder, converted, tmp_path, command, change
) -> None:
    model = shutil.copytree(tiny_folder if command == "convert" else converted, tmp_path / "model")
    file, read = model / WEIGHTS, []
    real = SafetensorsCheckpoint.read

    def change_it() -> None:
        if change == "written to":
            with file.open("r+b") as opened:
                opened.seek(-8, os.SEEK_END)
                opened.write(bytes(8))
            os.utime(file, ns=(0, file.stat().st_mtime_ns + 1_000_000))  # clocks of file systems may be slow
        elif change == "replaced":
            (model / "other").write_bytes(file.read_bytes() + bytes(16))
            (model / "other").replace(file)
        elif change == "cut short":
            os.truncate(file, file.stat().st_size // 2)
        else:
            file.unlink()

    def reading(self: SafetensorsCheckpoint, name: str) -> torch.Tensor:
        read.append(name)
        if len(read) == 5:
            change_it()
        return real(self, name)

    monkeypatch.setattr(SafetensorsCheckpoint, "read", reading)
    said = "No such file" if change == "removed" else "changed while it was read"
    check(write(command, tmp_path / "out", model), SourceError, said, str(file))
    assert len(read) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
