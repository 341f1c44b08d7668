"""The command line: the commands put together, and the one place where errors become text and exit codes.

Loading this module loads neither torch nor transformers, so that ``--help`` and ``--version`` answer at once.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from mla_convert.cli._interrupts import InterruptedRunError, interruption
from mla_convert.cli._mistakes import explain
from mla_convert.cli.absorb import absorb
from mla_convert.cli.compare import compare
from mla_convert.cli.convert import convert
from mla_convert.cli.evaluate import evaluate
from mla_convert.cli.export import export
from mla_convert.cli.generate import generate
from mla_convert.cli.heal import heal
from mla_convert.cli.inspect import inspect
from mla_convert.cli.plan import plan
from mla_convert.cli.push import push
from mla_convert.cli.recipes import recipes
from mla_convert.cli.report import report
from mla_convert.cli.serve import serve
from mla_convert.cli.verify import verify
from mla_convert.errors import MLAConvertError

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h

# The packages that decide a result, and those that a user's report of a fault needs.
DECISIVE = ("torch", "transformers", "safetensors", "triton", "tokenizers", "huggingface_hub", "datasets", "gguf")

app = typer.Typer(
    name="mla-convert",
    help="Convert grouped-query attention checkpoints to multi-head latent attention, and measure what it cost.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_versions(wanted: bool) -> None:
    """Print the versions that decide a result, read from the installed packages' metadata, and stop."""
    if not wanted:
        return
    import platform
    from importlib import metadata

    from mla_convert import __version__

    typer.echo(f"mla-convert {__version__}")
    typer.echo(f"python {platform.python_version()}")
    for package in DECISIVE:
        try:
            typer.echo(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            typer.echo(f"{package} not installed")
    raise typer.Exit()


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_versions,
            is_eager=True,
            help="Print the versions of this program and of the packages that decide its results.",
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# Each command with the example that its help ends with.
COMMANDS = (
    (inspect, "mla-convert inspect builtin:smollm2-135m"),
    (recipes, "mla-convert recipes show default > mine.yaml"),
    (plan, "mla-convert plan builtin:smollm2-135m --budget-gb 8 --context 2048"),
    (convert, "mla-convert convert builtin:smollm2-135m out/mla --cache 0.5 --calibration builtin:pydoc"),
    (heal, "mla-convert heal out/mla out/healed --teacher builtin:smollm2-135m --text builtin:pydoc"),
    (evaluate, "mla-convert evaluate out/mla --against builtin:smollm2-135m --text builtin:pydoc --max-tokens 8192"),
    (compare, "mla-convert compare out/mla out/healed --html compared.html"),
    (report, "mla-convert report out/mla"),
    (absorb, "mla-convert absorb out/mla"),
    (export, "mla-convert export out/mla out/served --target transformers"),
    (verify, "mla-convert verify out/served --engine transformers"),
    (push, "mla-convert push out/mla yourname/smollm2-135m-mla --private --dry-run"),
    (serve, "mla-convert serve out/served"),
    (generate, 'mla-convert generate out/mla --prompt "The first programming language was"'),
)
for _command, _example in COMMANDS:
    # \b: not to be wrapped, so that it can be copied.
    app.command(epilog=f"Example:\n\n\b\n{_example}")(_command)


def _fail(message: str, remedy: str, exit_code: int) -> int:
    """Write the two lines that every failure ends with to standard error; return the exit code."""
    typer.echo(f"error: {message}", err=True)
    typer.echo(f"  try: {remedy}", err=True)
    return exit_code


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; failures have been written to standard error."""
    log = logging.getLogger("mla_convert")
    before = list(log.handlers), log.level, log.propagate
    try:
        return _run(arguments, log)
    finally:
        log.handlers[:], log.propagate = before[0], before[2]
        log.setLevel(before[1])


def _run(arguments: Sequence[str], log: logging.Logger) -> int:
    try:
        outcome = app(list(arguments), prog_name="mla-convert", standalone_mode=False)
    except InterruptedRunError as error:
        typer.echo(interruption(error, arguments), err=True)
        return INTERRUPTED
    except MLAConvertError as error:
        log.debug("where it failed", exc_info=True)
        return _fail(error.message, error.remedy, error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        outcome = INTERRUPTED
    except Exception as error:
        # What typer raises for a wrong command line has no public base class in all supported versions.
        complaint = getattr(error, "format_message", None)
        if complaint is not None:
            return _fail(*explain(error, arguments, [command.__name__ for command, _ in COMMANDS]), 2)
        if log.isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        summary = " ".join(str(error).split()) or "no message"
        return _fail(
            f"unexpected {type(error).__name__}: {summary}",
            "run the same command with --verbose and report the traceback it prints",
            UNEXPECTED,
        )
    if outcome == INTERRUPTED:
        typer.echo(interruption(InterruptedRunError(), arguments), err=True)
    return outcome if isinstance(outcome, int) else 0


def main() -> None:
    """The entry point of the ``mla-convert`` script; asked to terminate, it cleans up as after an interrupt."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run(sys.argv[1:]))


def _terminate(*_: object) -> None:
    raise KeyboardInterrupt
