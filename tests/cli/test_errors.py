"""How failures are shown, and the exit codes that scripts can rely on."""

import subprocess
import sys

import pytest

from mla_convert import sources
from mla_convert.cli import run
from mla_convert.cli.convert import check_sizes
from mla_convert.errors import MLAConvertError, SourceError, UsageError


def fail_with(error: BaseException):
    """Return a stand-in for ``open_source`` that raises."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_an_expected_failure_is_two_lines_and_its_own_exit_code(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sources, "open_source", fail_with(SourceError("the shard 7 is gone", "download it again")))
    assert run(["inspect", "anything"]) == SourceError.exit_code
    streams = capsys.readouterr()
    assert streams.err == "error: the shard 7 is gone\n  try: download it again\n"
    assert streams.out == ""


def test_with_json_a_failure_prints_nothing_to_standard_output(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sources, "open_source", fail_with(SourceError("gone", "look elsewhere")))
    assert run(["inspect", "anything", "--json"]) == SourceError.exit_code
    assert capsys.readouterr().out == ""


def test_an_unexpected_failure_is_one_line_and_asks_for_the_traceback(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sources, "open_source", fail_with(ZeroDivisionError("by\nzero")))
    assert run(["inspect", "anything"]) == 70
    error = capsys.readouterr().err
    assert error.startswith("error: unexpected ZeroDivisionError: by zero\n")
    assert "--verbose" in error
    assert "Traceback" not in error


def test_verbose_shows_the_traceback(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sources, "open_source", fail_with(ZeroDivisionError("by zero")))
    assert run(["inspect", "anything", "--verbose"]) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_interrupt_ends_with_130_and_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sources, "open_source", fail_with(KeyboardInterrupt()))
    assert run(["inspect", "anything"]) == 130
    assert capsys.readouterr().err.startswith("interrupted")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bogus"], "bogus"),
        (["inspect"], "SOURCE"),
        (["evaluate", "model"], "--text"),
        (["convert", "a", "b", "--format", "onnx"], "onnx"),
        (["generate", "model", "--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
    ],
)
def test_a_wrong_command_line_says_which_part_and_where_help_is(arguments, said, capsys) -> None:
    assert run(arguments) == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert remedy.startswith("  try: mla-convert")
    assert remedy.endswith("--help")


@pytest.mark.parametrize(
    ("cache", "kv_rank", "rope_dim", "said"),
    [
        (0.5, 64, None, "--cache"),
        (0.5, 64, 32, "--cache"),
        (None, 64, None, "--rope-dim"),
        (None, None, 32, "--kv-rank"),
        (0.0, None, None, "--cache 0"),
        (-0.5, None, None, "--cache"),
        (1.5, None, None, "--cache 1.5"),
        (float("nan"), None, None, "--cache nan"),
        (None, 0, 32, "--kv-rank 0"),
        (None, 64, 31, "--rope-dim 31"),
        (None, 64, -2, "--rope-dim -2"),
    ],
)
def test_sizes_that_no_source_could_meet_are_refused(cache, kv_rank, rope_dim, said) -> None:
    with pytest.raises(UsageError) as caught:
        check_sizes(cache, kv_rank, rope_dim)
    assert said in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(("cache", "kv_rank", "rope_dim"), [(None, None, None), (1.0, None, None), (None, 1, 0)])
def test_sizes_that_a_source_may_meet_pass(cache, kv_rank, rope_dim) -> None:
    check_sizes(cache, kv_rank, rope_dim)


def test_every_kind_of_failure_has_its_own_exit_code() -> None:
    kinds = [MLAConvertError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    codes = [kind.exit_code for kind in kinds]
    assert len(set(codes)) == len(codes)
    # 64 and up are sysexits.h's, 128 and up the shell's.
    assert all(0 < code < 64 for code in codes)


def test_a_request_to_terminate_is_an_interrupt(tmp_path) -> None:
    code = (
        "import os, signal, sys, threading\n"
        "import mla_convert.cli as cli\n"
        "def wait(*_):\n"
        "    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "    signal.pause()\n"
        "cli._run = lambda arguments, log: wait()\n"
        "try:\n"
        "    cli.main()\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(99)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 99
