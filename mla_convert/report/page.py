"""A page of sections: one HTML file that loads nothing, in the reader's light or dark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from mla_convert import __version__
from mla_convert.report.sections import Section


def page(
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    *,
    headline: Sequence[tuple[str, str]] = (),
    json_name: str | None = None,
    wide: bool = False,
) -> str:
    """Return the HTML of a page; all text is escaped, and its own policy keeps a browser from loading anything.

    Args:
        headline: pairs (figure, what it is) above everything.
        json_name: the file beside it that holds the same data.
        wide: for tables of many columns.
    """
    here = files("mla_convert.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["marked"] = _marked
    template = environment.from_string(here.joinpath("page.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        headline=headline,
        json_name=json_name,
        wide=wide,
        version=__version__,
        style=Markup(here.joinpath("page.css").read_text(encoding="utf-8").strip()),
    )


def _marked(text: str) -> Markup:
    """Escape a paragraph, and show what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
