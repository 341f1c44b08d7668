"""``mla-convert compare``: several conversions in one table, and in one plot of quality against cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_convert.cli._options import JsonOption, QuietOption, VerboseOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_convert.cli._console import Screen
    from mla_convert.report.comparison import Compared


def compare(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL...", help="Folders that convert or heal wrote.", show_default=False),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a page with a plot of quality against cache besides.", show_default=False
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Put conversions beside each other: what each caches, and what `evaluate --record` measured of it."""
    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as out:
        from mla_convert.report.comparison import compare_folders, comparison_page

        compared = compare_folders(models)
        if html is not None:
            _write(html, comparison_page(compared))
        written = None if html is None else str(html)
        out.result({"models": [one.to_json() for one in compared], "html": written})
        _show(out, compared)
        if written is not None:
            out.line(f"wrote {written}")


def _write(path: Path, content: str) -> None:
    """Write the page.

    Raises:
        OutputError: it cannot be written.
    """
    from mla_convert.errors import OutputError

    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}", "choose another --html FILE") from error


def _show(out: Screen, compared: Sequence[Compared]) -> None:
    """A table of what each conversion is, and one of what was measured."""
    from mla_convert.report.comparison import COLUMNS, MEASURED_COLUMNS, rows

    shown: list[tuple[str, ...]] = []
    before = None
    for row in rows(compared):
        repeated = row[: len(COLUMNS)] == before
        before = row[: len(COLUMNS)]
        shown.append(("",) * len(COLUMNS) + row[len(COLUMNS) :] if repeated else row)
    out.table("conversions", (*COLUMNS, *MEASURED_COLUMNS), shown)
