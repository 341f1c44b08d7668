"""The command that serves a folder: which engine, and what each form needs said."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from mla_convert.errors import FormatError, SourceError, UsageError
from mla_convert.serving import launch
from mla_convert.serving.launch import look_at, serve_command


def folder(path: Path, **config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def having(monkeypatch: pytest.MonkeyPatch):
    def only(*engines: str) -> None:
        monkeypatch.setattr(launch, "installed", lambda engine: engine in engines)

    return only


def test_the_best_engine_that_is_installed_serves_each_form(
    tmp_path: Path, having, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = look_at(folder(tmp_path / "stock", model_type="deepseek_v3"))
    custom = look_at(folder(tmp_path / "custom", model_type="deepseek_v3", auto_map={}))
    native = look_at(folder(tmp_path / "native", model_type="mla_convert", auto_map={}))
    having("vllm", "transformers")
    assert serve_command(stock)[:3] == ["vllm", "serve", str(tmp_path / "stock")]
    assert "--trust-remote-code" not in serve_command(stock)
    assert serve_command(custom)[-3:] == ["--model-impl", "transformers", "--trust-remote-code"]
    monkeypatch.setattr(launch, "find_spec", lambda name: name == "vllm")  # with it, vLLM has this package's plugin
    assert serve_command(custom) == [*serve_command(stock)[:2], str(tmp_path / "custom"), *serve_command(stock)[3:]]
    # vLLM cannot fuse the native class, which has no norm on the latent
    assert serve_command(native)[0] == "transformers"
    having("transformers")
    assert serve_command(stock, port=9, dtype="bfloat16", extra=("--device", "cpu")) == [
        *("transformers", "serve", str(tmp_path / "stock"), "--host", "127.0.0.1", "--port", "9"),
        *("--dtype", "bfloat16", "--device", "cpu"),
    ]


def test_an_engine_that_cannot_serve_the_form_is_refused_with_what_to_do(tmp_path: Path, having) -> None:
    native = look_at(folder(tmp_path / "native", model_type="mla_convert"))
    having("vllm", "transformers", "llamacpp")
    with pytest.raises(FormatError, match="--target vllm"):
        serve_command(native, "vllm")
    with pytest.raises(FormatError, match="--target gguf"):
        serve_command(native, "llamacpp")
    having()
    with pytest.raises(UsageError, match=r"transformers\[serving\]"):
        serve_command(native)


def test_gguf_files_are_for_llamacpp(tmp_path: Path, having) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    having("vllm", "transformers", "llamacpp")
    expected = ["llama-server", "-m", str(file), "--host", "127.0.0.1", "--port", "8000"]
    assert serve_command(look_at(tmp_path)) == expected
    assert serve_command(look_at(file)) == expected
    with pytest.raises(FormatError, match="--engine llamacpp"):
        serve_command(look_at(tmp_path), "vllm")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(SourceError, match="2 GGUF files"):
        look_at(tmp_path)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds no model"):
        look_at(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(SourceError, match="not a model config"):
        look_at(tmp_path)


def test_installed_looks_for_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not launch.installed("llamacpp")
    (tmp_path / "llama-server").write_text("#!/bin/sh\n")
    (tmp_path / "llama-server").chmod(0o755)
    assert launch.installed("llamacpp")


def test_a_dtype_is_not_dropped_without_a_word(tmp_path: Path, having) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    having("llamacpp")
    with pytest.raises(UsageError, match=r"llama\.cpp computes"):
        serve_command(look_at(tmp_path), dtype="bfloat16")


def test_a_rejected_export_is_served_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = folder(tmp_path / "out.rejected", model_type="deepseek_mla", auto_map={})
    record = served / "conversion.json"
    for export, warned in (({"verification": {"passed": False}}, True), ({"verification": None}, False), ([], False)):
        record.write_text(json.dumps({"export": export}))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert look_at(served).kind == "custom"
        assert ("was rejected" in caplog.text) is warned
