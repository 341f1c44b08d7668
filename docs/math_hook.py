"""Formulas for the site: LaTeX, as GitHub shows it in Markdown, becomes MathML, which browsers draw by themselves.

A block is a fence of the language ``math``; in a line a formula stands between ``$`` and backticks. Markdown sees
a word in each formula's place, so that it takes nothing in them for its own.
"""

import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r"^```math\n(?P<block>.*?)\n```$|\$`(?P<inline>[^`\n]+)`\$", re.MULTILINE | re.DOTALL)
WORD = "formula{}formula"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with a page's Markdown; returns it with a word in place of each formula."""
    page.formulas = []

    def word(found: re.Match[str]) -> str:
        page.formulas.append(_mathml(found))
        return WORD.format(len(page.formulas) - 1)

    return FORMULA.sub(word, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with a page's HTML; returns it with the formulas in."""
    return re.sub(WORD.format(r"(\d+)"), lambda found: page.formulas[int(found[1])], html)


def _mathml(found: re.Match[str]) -> str:
    if found["inline"] is not None:
        return convert(found["inline"])
    block = convert(found["block"], display="block")
    return f'<span style="display: block; overflow: auto hidden; padding: 0.3em 0">{block}</span>'
