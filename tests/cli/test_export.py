"""The commands for serving: export, verify and serve, as a user types them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest


def test_a_dry_run_says_what_each_target_would_write_and_writes_nothing(cli, converted) -> None:
    before = sorted(converted.parent.iterdir())
    plans = cli("export", converted, "--dry-run", "--json").json()["plans"]
    assert [plan["target"] for plan in plans] == ["transformers", "vllm", "sglang", "gguf"]
    assert plans[0]["form"] == "custom"
    assert plans[0]["exact"] is True
    assert sorted(converted.parent.iterdir()) == before
    shown = cli("export", converted, "--dry-run", "--target", "transformers")
    assert shown.code == 0
    assert "vllm" not in shown.out
    assert "transformers" in shown.out


def test_an_export_is_written_verified_and_asked_again(cli, converted, tmp_path) -> None:
    answer = cli("export", converted, tmp_path / "out", "--target", "transformers", "--json").json()
    assert answer["verification"]["passed"] is True
    again = cli("verify", tmp_path / "out", "--engine", "transformers", "--json").json()
    assert again["passed"] is True
    assert again["difference"]["agreed"] == again["difference"]["continuation"]
    # an export is not a conversion: what can be exported is said
    refused = cli("export", tmp_path / "out", tmp_path / "two", "--target", "gguf")
    assert refused.code == 10
    assert "native format" in refused.err


def test_an_export_that_was_changed_is_found_out(cli, converted, tmp_path) -> None:
    assert cli("export", converted, tmp_path / "out", "--target", "transformers", "--no-verify").code == 0
    assert cli("verify", tmp_path / "out", "--engine", "transformers").code == 3  # nothing to compare with
    assert cli("export", converted, tmp_path / "good", "--target", "transformers", "--quiet").code == 0
    config = tmp_path / "good" / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"attention_scale": fields["attention_scale"] * 2}))
    answer = cli("verify", tmp_path / "good", "--engine", "transformers")
    assert answer.code == 12
    assert "FAILED" in answer.out
    assert "does not answer" in answer.err


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("OUT",), 2, "--target"),
        (("--target", "vllm"), 2, "OUT"),
        (("OUT", "--target", "transformers", "--rope-dim", "7"), 2, "odd"),
        (("OUT", "--target", "transformers", "--kv-rank", "1"), 10, "cannot hold"),
        (("OUT", "--target", "transformers", "--dtype", "q8_0"), 10, "q8_0"),
        (("OUT", "--target", "transformers", "--form", "stock"), 10, "stock"),
        (("OUT", "--target", "transformers", "--max-shard-size", "0"), 2, "shard size"),
        (("OUT", "--target", "onnx"), 2, "onnx"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    cli, converted, tmp_path, arguments: tuple[str, ...], code: int, complaint: str
) -> None:
    given = [str(tmp_path / "out") if argument == "OUT" else argument for argument in arguments]
    answer = cli("export", converted, *given)
    assert answer.code == code
    assert complaint in answer.err
    assert not list(tmp_path.iterdir())


def test_a_source_is_not_a_conversion(cli, tiny_folder, tmp_path) -> None:
    answer = cli("export", tiny_folder, tmp_path / "out", "--target", "vllm")
    assert answer.code == 10
    assert "'llama' model" in answer.err


def test_an_engine_that_is_not_installed_is_named(cli, converted, tmp_path, monkeypatch) -> None:
    assert cli("export", converted, tmp_path / "out", "--target", "transformers", "--quiet").code == 0
    empty = tmp_path / "python"
    empty.write_text("#!/bin/sh\nexit 1\n")
    empty.chmod(0o755)
    answer = cli("verify", tmp_path / "out", "--engine", "vllm", "--python", empty)
    assert answer.code == 12
    assert "not installed" in answer.err


def test_serve_becomes_the_command_that_it_prints(cli, converted, tmp_path, monkeypatch) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("PATH", str(tmp_path))
    became: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: became.append((path, command)))
    dry = cli("serve", tmp_path, "--dry-run", "--json").json()["command"]
    assert not became
    answer = cli("serve", tmp_path, "--port", "9000", "--", "--threads", "2")
    assert became == [(str(program), [*dry[:-1], "9000", "--threads", "2"])]
    assert answer.out == " ".join(became[0][1]) + "\n"
    missing = cli("serve", Path(converted))
    assert missing.code == 2
    assert "not installed" in missing.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "--text or --tasks"),
        (("--text", "builtin:pydoc", "--tasks", "x"), "--text or --tasks"),
        (("--text", "builtin:pydoc", "--limit", "3"), "--limit"),
        (("--tasks", "x", "--record", "--against", "MODEL"), "--record"),
        (("--tasks", " , "), "names no task"),
        (("--tasks", "x", "--include-path", "nowhere"), "not a folder"),
    ],
)
def test_texts_and_tasks_are_not_mixed(cli, converted, arguments: tuple[str, ...], complaint: str) -> None:
    given = [str(converted) if argument == "MODEL" else argument for argument in arguments]
    answer = cli("evaluate", converted, *given)
    assert answer.code == 2
    assert complaint in answer.err


def test_an_export_is_measured_like_any_other_model(cli, converted, text_file, tmp_path) -> None:
    assert cli("export", converted, tmp_path / "out", "--target", "transformers", "--no-verify").code == 0
    sizes = ("--text", text_file, "--context", "32", "--max-tokens", "512", "--json")
    found, before = (cli("evaluate", model, *sizes).json() for model in (tmp_path / "out", converted))
    assert found["perplexity"] == pytest.approx(before["perplexity"], rel=1e-5)
    assert found["cache_bytes_per_token"] >= before["cache_bytes_per_token"]
