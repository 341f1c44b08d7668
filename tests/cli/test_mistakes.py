"""Command lines with slips, help that ends with an example, completion, and interrupts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from mla_convert.cli import COMMANDS, app, run


@pytest.mark.parametrize(
    ("arguments", "error", "remedy"),
    [
        ("convert a --out b", "there is no option --out: OUT is an argument", "mla-convert convert SOURCE OUT"),
        ("convert a -o b", "there is no option -o: OUT is an argument", "mla-convert convert SOURCE OUT"),
        ("heal a --output-dir b", "there is no option --output-dir: OUT is an argument", "mla-convert heal MODEL OUT"),
        ("export a --out=b", "there is no option --out: OUT is an argument", "mla-convert export MODEL OUT"),
        ("convert --model a", "there is no option --model: SOURCE is an argument", "mla-convert convert SOURCE OUT"),
        ("convert a b --cahe 1", "there is no option --cahe: did you mean --cache?", "mla-convert convert --help"),
        (
            "evaluate a --max-token 4",
            "no option --max-token: did you mean --max-tokens?",
            "mla-convert evaluate --help",
        ),
        ("convert a b --tokens 4", "did you mean --token or --calibration-tokens?", "mla-convert convert --help"),
        ("absorb a --frobnicate", "there is no option --frobnicate", "mla-convert absorb --help"),
        ("--versoin", "there is no option --versoin: did you mean --version?", "mla-convert --help"),
        ("convert a b --cache", "--cache", "mla-convert convert --help"),
        ("convrt a b", "'convert'", "mla-convert --help"),
        ("inspekt a", "'inspect'", "mla-convert --help"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(cli, arguments: str, error: str, remedy: str) -> None:
    answer = cli(*arguments.split())
    assert (answer.code, answer.out) == (2, "")
    said, tried = answer.err.splitlines()
    assert error in said
    assert tried == f"  try: {remedy}"
    assert "--format" not in said  # what typer holds to be like --out


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every command of the command line, those of groups too."""
    found: dict[tuple[str, ...], Any] = {}
    for name, command in group.commands.items():
        nested = hasattr(command, "commands")
        found |= commands(command, (*path, name)) if nested else {(*path, name): command}
    return found


LEAVES = commands(typer.main.get_command(app))


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_help_ends_with_an_example_that_parses(cli, path: tuple[str, ...]) -> None:
    lines = cli(*path, "--help").out.rstrip().splitlines()
    assert "  Example:" in lines
    program, *arguments = shlex.split(lines[-1].partition(" > ")[0])
    assert program == "mla-convert"
    assert tuple(arguments[: len(path)]) == path
    LEAVES[path].make_context(path[-1], arguments[len(path) :])  # raises where an option or argument is wrong


def test_every_command_has_help_in_the_table() -> None:
    assert {command.__name__ for command, _ in COMMANDS} <= {path[0] for path in LEAVES}


@pytest.mark.parametrize(
    ("typed", "offered"), [("mla-convert ins", "inspect"), ("mla-convert convert --cac", "--cache")]
)
def test_bash_completes_commands_and_options(typed: str, offered: str) -> None:
    words = typed.split()
    environment = {
        **os.environ,
        "_MLA_CONVERT_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    code = "from mla_convert.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert offered in done.stdout.split()


def test_the_completion_script_can_be_shown(monkeypatch, capsys) -> None:
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    with pytest.raises(SystemExit) as ended:
        run(["--show-completion"])
    assert ended.value.code == 0
    assert "complete -o default -F _mla_convert_completion mla-convert" in capsys.readouterr().out


@pytest.fixture
def interrupt(monkeypatch):
    """Have a function keep a file, if one is given, and then receive the signal that Ctrl-C sends."""

    def install(name: str, kept: Path | None = None) -> None:
        def stopped(*_: object, **__: object) -> None:
            if kept is not None:
                kept.write_bytes(bytes(1_500_000))
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(name, stopped)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    yield install
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_conversion_says_what_is_kept_and_how_to_go_on(cli, tiny_folder, tmp_path, interrupt) -> None:
    out = tmp_path / "my mla"
    interrupt("mla_convert.complete.convert_and_heal", tmp_path / ".my mla.calibration.safetensors")
    (tmp_path / ".my mla.partial-1-ab").mkdir()  # another process's, still at work
    (tmp_path / ".my mla.calibration.safetensors.partial-1").touch()
    answer = cli("convert", tiny_folder, out, "--cache", "0.5", "--token", "hf_secret")
    assert (answer.code, answer.out) == (130, "")
    said, command = answer.err.splitlines()
    assert said == f"interrupted: kept in {tmp_path} for the next run: .my mla.calibration.safetensors (1.5 MB)"
    assert command == f"  to go on: mla-convert convert {tiny_folder} '{out}' --cache 0.5 --token ..."


def test_an_interrupted_conversion_that_kept_nothing_says_so(cli, tiny_folder, tmp_path, interrupt) -> None:
    interrupt("mla_convert.complete.convert_and_heal")
    answer = cli("convert", tiny_folder, tmp_path / "mla", "--cache", "0.5", "--json")
    assert (answer.code, answer.out) == (130, "")
    said, command = answer.err.splitlines()
    assert said == f"interrupted: nothing was kept, and nothing is left of {tmp_path / 'mla'}"
    assert command == f"  to start again: mla-convert convert {tiny_folder} {tmp_path / 'mla'} --cache 0.5 --json"


def test_an_interrupted_healing_says_how_to_go_on(cli, converted, tiny_folder, tmp_path, interrupt) -> None:
    interrupt("mla_convert.heal.healing.heal", tmp_path / ".healed.heal")
    answer = cli("heal", converted, tmp_path / "healed", "--teacher", tiny_folder, "--text", "builtin:pydoc")
    assert answer.code == 130
    assert ".healed.heal (1.5 MB)" in answer.err
    assert "  to go on: mla-convert heal " in answer.err


def test_an_interrupted_measurement_keeps_nothing(cli, tiny_folder, text_file, interrupt) -> None:
    interrupt("mla_convert.evaluate.perplexity")
    answer = cli("evaluate", tiny_folder, "--text", text_file)
    assert (answer.code, answer.out) == (130, "")
    assert answer.err.splitlines()[0] == "interrupted: a measurement keeps nothing"
    assert f"  to start again: mla-convert evaluate {tiny_folder}" in answer.err
