"""Plots as SVG elements whose colours and font are those of the page they stand in.

matplotlib writes one colour for one thing. Here every colour stands for a CSS variable, which replaces it in what was
written, so that one drawing is readable on a light page and on a dark one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES, DEPTHS = 6, 8
_NAMES = (
    *("ink", "muted", "grid", "cell", "heat"),
    *(f"series-{i}" for i in range(SERIES)),
    *(f"depth-{i}" for i in range(DEPTHS)),
)
_STAND_INS = {name: f"#0b{index:02x}5e" for index, name in enumerate(_NAMES)}
# Besides colour, so that series can be told apart without it.
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 3)), (0, (8, 2)))

_WIDTH = 7.6  # inches of 72 units; the page scales the drawing to its column


def colour(name: str) -> str:
    """Return what stands for the page's colour `name` until the drawing is finished."""
    return _STAND_INS[name]


def series(index: int, *, markersize: float = 3.5) -> dict[str, Any]:
    """Return the look of a line: colour, marker and dashes that no other of the first six has."""
    index %= SERIES
    return {
        "color": colour(f"series-{index}"),
        "marker": MARKERS[index],
        "linestyle": DASHES[index],
        "markersize": markersize,
        "linewidth": 1.4,
    }


def depth(index: int, count: int) -> int:
    """Return which of the eight shades of depth a layer of `count` has."""
    return index * DEPTHS // count


def draw(name: str, title: str, description: str, height: float, paint: Callable[[Figure, Axes], None]) -> str:
    """Return an ``<svg>`` element; the same arguments give the same text.

    Args:
        name: unique on its page; what ids in the element begin with.
        title, description: what a screen reader says of it.
        height: in inches, where the width is 7.6.
        paint: draws into the figure and its axes.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ink, muted, grid = colour("ink"), colour("muted"), colour("grid")
    style: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text: it can be read out, searched and copied
        "svg.hashsalt": name,
        "font.size": 9,
        "axes.titlesize": 9,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": muted,
        "xtick.color": muted,
        "ytick.color": muted,
        "grid.color": grid,
        "grid.linewidth": 0.6,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "legend.handlelength": 3.0,
        "legend.labelcolor": ink,
    }
    # A figure made without pyplot has no window and is nobody's current one; the style is put back afterwards.
    with mpl.rc_context(style):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        paint(figure, figure.subplots())
        written = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    return _element(written.getvalue(), name, title, description)


def _element(document: str, name: str, title: str, description: str) -> str:
    """Make of an SVG document an element for a page: named, without ids that others have, in the page's colours."""
    body = document[document.index("<svg") :]
    head, body = body.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None  # matplotlib always writes one
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[A-Za-z][A-Za-z0-9.]*_\d+"', "<g", body)  # groups have names that nothing refers to
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    # Hundredths of a unit are below a pixel; numbers in labels are not inside of tags.
    body = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag.group()), body)
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body)
    for part, stand_in in _STAND_INS.items():
        body = body.replace(stand_in, f"var(--{part})")
    body = re.sub(r"\s*\n\s*", "\n", body)
    labels = (
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-description">{escape(description)}</desc>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box.group()} role="img" '
        f'aria-labelledby="{name}-title {name}-description">{labels}{body.strip()}'
    )
