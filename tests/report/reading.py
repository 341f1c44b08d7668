"""A page as a parser sees it: its elements with their attributes, and the text in them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass
class Element:
    """An element with what is in it."""

    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def all(self, tag: str) -> list[Element]:
        """The elements of this name inside, in the page's order."""
        found = []
        for child in self.children:
            found += [child] if child.tag == tag else []
            found += child.all(tag)
        return found

    def everything(self) -> list[Element]:
        """All elements inside."""
        return [one for child in self.children for one in (child, *child.everything())]

    def said(self) -> str:
        """The text in it and in what is inside."""
        return " ".join([self.text, *(child.said() for child in self.children)]).strip()

    def cells(self) -> list[list[str]]:
        """A table's rows; of its head first."""
        return [[cell.said() for cell in row.children] for row in self.all("tr")]


class _Reader(HTMLParser):
    VOID = ("meta", "br", "hr", "img", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("page", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(made)
        if tag not in self.VOID:
            self.open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.open[-1].text += data


def read(html: str) -> Element:
    """Return the page; an element that is not closed, or closed by another's tag, is an error."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].tag}> is not closed"
    return reader.open[0]


def variables(css: str) -> dict[str, dict[str, str]]:
    """The page's CSS variables, for ``light`` and ``dark``."""
    blocks = re.findall(r":root \{([^}]*)\}", css)
    assert len(blocks) == 2
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks)
    return {"light": light, "dark": dark}
