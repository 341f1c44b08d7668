"""Write the report of a converted folder into it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from mla_convert.errors import OutputError, SourceError
from mla_convert.report.data import JSON_NAME, ReportData, read_data
from mla_convert.report.details import ReportDetails
from mla_convert.report.page import page
from mla_convert.report.sections import headline, healing, sections, short

HTML_NAME = "report.html"

logger = logging.getLogger(__name__)


def write_report(folder: Path, details: ReportDetails | None = None) -> None:
    """Write ``report.html`` and ``report.json`` from the folder's conversion.json and what lies beside it.

    Each file appears whole.

    Args:
        details: of the layers; for None those of the report.json that is there, and without one what config.json says.

    Raises:
        SourceError: the folder holds no conversion, or what it holds cannot be read.
        OutputError: the files cannot be written.
    """
    data = read_data(folder, details)
    contents = {
        JSON_NAME: json.dumps(data.to_json(), separators=(",", ":"), allow_nan=False) + "\n",
        HTML_NAME: render(data, folder),
    }
    try:
        for name, content in contents.items():
            temporary = folder / f".{name}.partial"
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(folder / name)
    except OSError as error:
        raise OutputError(
            f"the report cannot be written to {folder}: {error.strerror or error}", "free some disk space"
        ) from error


def render(data: ReportData, folder: Path) -> str:
    """Return the HTML of a report.

    Raises:
        SourceError: the record in `folder` lacks something that every conversion writes down.
    """
    record = data.record
    try:
        ref, recipe = record["source"]["ref"], record["recipe"].get("name", "of its own")
        subtitle = (
            f"Recipe {recipe}, {record['format']} format, {healing(record)}; converted from {ref} by mla-convert "
            f"{record['tool']['version']}."
        )
        shown = sections(data)
        return page(
            f"{short(ref).removeprefix('builtin:')} with latent attention",
            subtitle,
            shown,
            headline=tuple(headline(record)),
            json_name=JSON_NAME,
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise SourceError(
            f"the record in {folder} cannot be shown: {type(error).__name__}: {error}",
            "name a folder that convert or heal wrote",
        ) from error
