"""Bad input from end to end: one message with a remedy, an exit code above 0, and nothing left behind."""

import json
import shutil
from pathlib import Path

import pytest

from mla_convert.errors import (
    OutputError,
    PlanError,
    RecipeError,
    SourceError,
    TextError,
    UnaccountedTensorError,
    UnsupportedArchitectureError,
    UsageError,
)
from tests.tiny import save_source, tiny_llama


@pytest.fixture
def source(tiny_folder, tmp_path) -> Path:
    """A copy of the tiny source that a test may damage."""
    return shutil.copytree(tiny_folder, tmp_path / "source")


def without_config(source: Path) -> Path:
    (source / "config.json").unlink()
    return source


def with_unreadable_config(source: Path) -> Path:
    (source / "config.json").write_text("{")
    return source


def with_a_shard_missing(source: Path) -> Path:
    sharded = save_source(tiny_llama(), source.parent / "sharded", shards=3)
    (sharded / "model-00002-of-00003.safetensors").unlink()
    return sharded


def truncated(source: Path) -> Path:
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return source


def of_another_family(source: Path) -> Path:
    config = json.loads((source / "config.json").read_text())
    config["architectures"] = ["GemmaXForCausalLM"]
    (source / "config.json").write_text(json.dumps(config))
    return source


def with_a_tensor_missing(source: Path) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


def that_does_not_exist(source: Path) -> Path:
    return source.parent / "nowhere"


def gguf_of_another_architecture(source: Path) -> Path:
    gguf = pytest.importorskip("gguf")
    file = source.parent / "model.gguf"
    writer = gguf.GGUFWriter(file, "gptneox")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def check(answer, kind: type, out: Path) -> None:
    """Assert one message with a remedy, the exit code of its kind, nothing on standard output and no output left."""
    assert answer.code == kind.exit_code, answer.err
    lines = answer.err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("  try: ")
    assert answer.out == ""
    left = [path.name for path in out.parent.iterdir() if out.name in path.name]
    assert left == []


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (without_config, SourceError),
        (with_unreadable_config, SourceError),
        (with_a_shard_missing, SourceError),
        (truncated, SourceError),
        (that_does_not_exist, SourceError),
        (of_another_family, UnsupportedArchitectureError),
        (gguf_of_another_architecture, UnsupportedArchitectureError),
        (with_a_tensor_missing, UnaccountedTensorError),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_a_bad_source(cli, source, damage, kind, command) -> None:
    bad, out = damage(source), source.parent / "written"
    arguments = [command, bad] if command == "inspect" else [command, bad, out, "--cache", "0.5", "--json"]
    check(cli(*arguments), kind, out)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (("--kv-rank", 65, "--rope-dim", 8), PlanError),
        (("--kv-rank", 16, "--rope-dim", 34), PlanError),
        (("--cache", 0.0001), PlanError),
        (("--kv-rank", 16, "--rope-dim", 7), UsageError),
        (("--cache", 1.5), UsageError),
        (("--cache", 0.5, "--kv-rank", 16), UsageError),
        (("--cache", 0.5, "--recipe", "no-such-recipe"), RecipeError),
        (("--cache", 0.5, "--calibration", "./no-such-text.txt"), TextError),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else value.__name__,
)
def test_bad_options(cli, tiny_folder, tmp_path, options, kind) -> None:
    out = tmp_path / "written"
    check(cli("convert", tiny_folder, out, *options), kind, out)


def test_an_output_folder_that_exists_is_kept(cli, tiny_folder, text_file, tmp_path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("kept")
    answer = cli("convert", tiny_folder, out, "--cache", 0.5, "--calibration", text_file)
    assert answer.code == OutputError.exit_code
    assert "--overwrite" in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "precious").read_text() == "kept"


def test_evaluation_text_that_is_too_short(cli, tiny_folder, tmp_path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    check(cli("evaluate", tiny_folder, "--text", text, "--json"), TextError, tmp_path / "none")


def test_absorbing_what_was_not_converted(cli, tiny_folder) -> None:
    answer = cli("absorb", tiny_folder)
    assert answer.code != 0
    assert "  try: " in answer.err
    assert not (tiny_folder / "absorbed.safetensors").exists()


def test_a_mode_of_a_model_that_has_none(cli, tiny_folder) -> None:
    answer = cli("generate", tiny_folder, "--prompt", "x", "--mode", "absorbed")
    assert answer.code == UsageError.exit_code
    assert "--format native" in answer.err
