"""What the commands show: tables and results on standard output; progress, warnings and logs on standard error."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from mla_convert.cli._interrupts import NOTHING_LEFT, InterruptedRunError, kept_beside
from mla_convert.progress import Progress


class Screen:
    """The two streams of one command.

    Attributes:
        as_json: standard output is for the one JSON object; tables and lines are not shown.
    """

    def __init__(self, *, as_json: bool, quiet: bool, out: TextIO, err: TextIO) -> None:
        self.as_json = as_json
        for stream in (out, err):
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:  # a terminal or pipe that cannot show a character must not end the run
                reconfigure(errors="backslashreplace")
        self._quiet = quiet
        self._result: Mapping[str, Any] | None = None
        self._kept: Callable[[], Sequence[Path]] = tuple
        self._left = NOTHING_LEFT
        # In a pipe nothing is wrapped: a line of a table stays one line.
        self._out = Console(file=out, highlight=False, soft_wrap=True, width=None if out.isatty() else 1000)
        self._err = Console(file=err, highlight=False)

    @property
    def interactive(self) -> bool:
        """Whether a person is watching standard error."""
        return self._err.is_terminal and not self._quiet

    def log_handler(self) -> logging.Handler:
        """Return a handler that writes to standard error without breaking the bars."""
        if self.interactive:
            return RichHandler(console=self._err, show_time=False, show_path=False, markup=False)
        handler = logging.StreamHandler(self._err.file)
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        return handler

    def result(self, result: Mapping[str, Any]) -> None:
        """Keep what ``--json`` prints when the command has succeeded."""
        self._result = result

    def if_interrupted(self, left: str, out: Path | None = None) -> None:
        """Say what an interrupt leaves; what then lies beside ``out`` is what the next run goes on with."""
        self._left = left
        if out is not None:
            self._kept = lambda: kept_beside(out)

    def interrupted(self) -> InterruptedRunError:
        """What to end an interrupted command with."""
        return InterruptedRunError(self._kept(), self._left)

    def line(self, text: str = "") -> None:
        """Print a line of the result for a reader."""
        if not self.as_json:
            self._out.print(text, markup=False)

    def write(self, text: str) -> None:
        """Write text of the result as it is, and show it at once."""
        if not self.as_json:
            self._out.file.write(text)
            self._out.file.flush()

    def facts(self, title: str, rows: Sequence[tuple[str, object]]) -> None:
        """Print names and what they are for a reader, a line each, under a title."""
        width = max(len(name) for name, _ in rows)
        self.line(title)
        for name, value in rows:
            self.line(f"{name:<{width}}  {value}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table for a reader: the first column to the left, the others to the right."""
        if self.as_json:
            return
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0)
        )
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        self._out.print(table, markup=False)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress | None]:
        """Give a progress callback that draws a bar a stage with the time left; None where nobody watches."""
        if not self.interactive:
            yield None
            return
        with _Bars(self._err) as bars:
            yield bars

    def silence_loading(self) -> None:
        """Turn off transformers' bars for loading weights, which takes a moment; the hub's, for downloads, may stay.

        Imports transformers: for commands that load a model anyway.
        """
        from huggingface_hub.utils import enable_progress_bars
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        if self.interactive:
            enable_progress_bars()

    def flush_result(self) -> None:
        """Print the JSON object, if one was asked for and given."""
        if self.as_json and self._result is not None:
            self._out.file.write(json.dumps(_finite(self._result), indent=2, ensure_ascii=False) + "\n")
            self._out.file.flush()


def _finite(value: Any) -> Any:
    """Return a JSON value with null where a number is infinite or not a number, which JSON cannot write."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Bars:
    """Progress bars, one for each stage in the order of their first report."""

    def __init__(self, console: Console) -> None:
        self._bars = RichProgress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        )
        self._tasks: dict[str, TaskID] = {}
        self._started = False

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._started:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        # The bars start with the first report, so that they do not mix with the hub's own download bars before it.
        if not self._started:
            self._bars.start()
            self._started = True
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)


class _Caller(Screen):
    """What a command shows its results to when Python calls it: nothing is shown, and nothing is set up."""

    def __init__(self, progress: Progress | None) -> None:
        self.as_json = True
        self.returned: Mapping[str, Any] = {}
        self._progress = progress

    @property
    def interactive(self) -> bool:
        return False

    def result(self, result: Mapping[str, Any]) -> None:
        self.returned = result

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress | None]:
        yield self._progress

    def silence_loading(self) -> None:
        pass


_caller: ContextVar[_Caller | None] = ContextVar("caller", default=None)


@contextlib.contextmanager
def called_from_python(progress: Progress | None) -> Iterator[_Caller]:
    """Let the command that is called in the block report to `progress`, and leave its result in ``returned``."""
    caller = _Caller(progress)
    token = _caller.set(caller)
    try:
        yield caller
    finally:
        _caller.reset(token)


@contextlib.contextmanager
def screen(*, as_json: bool, quiet: bool, verbose: bool) -> Iterator[Screen]:
    """Give the command its streams; print the JSON result at the end if the block succeeds.

    With ``as_json``, whatever else is printed in the block goes to standard error. Other libraries' progress bars are
    off where nobody watches, and their warnings are shown with ``verbose`` only. Under :func:`called_from_python` none
    of this happens.
    """
    caller = _caller.get()
    if caller is not None:
        yield caller
        return
    output = Screen(as_json=as_json, quiet=quiet, out=sys.stdout, err=sys.stderr)
    _set_up_logging(output, quiet=quiet, verbose=verbose)
    _set_up_libraries(output.interactive, verbose=verbose)
    with contextlib.ExitStack() as stack:
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not verbose:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        try:
            yield output
        except KeyboardInterrupt as interrupt:  # typer would turn it into an exit code and no more
            raise output.interrupted() from interrupt
    output.flush_result()


def _set_up_logging(output: Screen, *, quiet: bool, verbose: bool) -> None:
    """Send the package's log to standard error: warnings, with ``verbose`` everything, with ``quiet`` errors only."""
    log = logging.getLogger("mla_convert")
    log.handlers = [output.log_handler()]
    log.setLevel(logging.DEBUG if verbose else logging.ERROR if quiet else logging.WARNING)
    log.propagate = False


def _set_up_libraries(interactive: bool, *, verbose: bool) -> None:
    """Keep other libraries' bars and chatter off; they read these variables when they are imported."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not interactive:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        os.environ.setdefault("DATASETS_VERBOSITY", "error")
