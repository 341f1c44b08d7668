"""The plots of a report, each from plain numbers to an SVG element."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mla_convert.report.details import LayerDetails
from mla_convert.report.drawing import DEPTHS, colour, depth, draw, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure
    from matplotlib.path import Path as MarkedPath

# (name, (x, y) by x)
Line = tuple[str, Sequence[tuple[float, float]]]

_LEAST_SHARE = 1e-5


def spectra(layers: Sequence[LayerDetails], kv_ranks: Sequence[int]) -> str:
    """The share of energy that a latent loses against its rank, a line a layer, with a dot at the layer's C."""

    def paint(figure: Figure, axes: Axes) -> None:
        count = len(layers)
        for i, (layer, rank) in enumerate(zip(layers, kv_ranks, strict=True)):
            shade = colour(f"depth-{depth(i, count)}")
            points = [(c, lost) for c, lost in zip(layer.ranks, layer.lost, strict=True) if lost >= _LEAST_SHARE]
            axes.plot(*zip(*points, strict=True), color=shade, linewidth=0.9)
            lost = dict(zip(layer.ranks, layer.lost, strict=True)).get(rank, 0.0)
            if lost >= _LEAST_SHARE:
                axes.plot([rank], [lost], color=shade, marker="o", markersize=4)
        for shade in sorted({depth(i, count) for i in range(count)}):
            own = [i for i in range(count) if depth(i, count) == shade]
            label = f"layer {own[0]}" if len(own) == 1 else f"layers {own[0]} to {own[-1]}"
            axes.plot([], [], color=colour(f"depth-{shade}"), label=label)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.3%}".rstrip("0%").rstrip(".") + "%")
        axes.set_ylim(bottom=_LEAST_SHARE, top=1.3)
        axes.set_xlim(0, max(layer.ranks[-1] for layer in layers))
        axes.set_xlabel("latent rank c")
        axes.set_ylabel("share of energy lost")
        figure.legend(loc="outside right upper")

    return draw("spectra", "Energy lost against rank", "One falling curve a layer; a dot marks its rank.", 3.6, paint)


def slots(counts: Sequence[Sequence[int]], frequencies: Sequence[float] | None) -> str:
    """How many RoPE slots each pair has in each layer, as a map with layers downwards and pairs to the right.

    Args:
        counts: [layers, pairs].
        frequencies: of the pairs, radians a position, where all layers have the same.
    """
    layers, pairs = len(counts), len(counts[0])
    most = max(max(row) for row in counts)
    steps = min(most, DEPTHS)

    def paint(figure: Figure, axes: Axes) -> None:
        from matplotlib.patches import Patch, PathPatch

        axes.grid(visible=False)
        axes.add_patch(PathPatch(_cells([(0, pairs, 0, layers)]), facecolor=colour("cell"), edgecolor="none"))
        key = []
        for step in range(1, steps + 1):
            low, high = most * (step - 1) // steps + 1, most * step // steps
            runs = [run for i, row in enumerate(counts) for run in _runs(row, i, low, high)]
            alpha = 0.3 + 0.7 * (step - 1) / max(1, steps - 1)
            look = {"facecolor": colour("heat"), "alpha": alpha, "edgecolor": "none"}
            if runs:
                axes.add_patch(PathPatch(_cells(runs), **look))
            key.append(Patch(label=str(low) if low == high else f"{low} to {high}", **look))
        axes.set_xlim(0, pairs)
        axes.set_ylim(layers, 0)
        _index_ticks(axes.xaxis, pairs)
        _index_ticks(axes.yaxis, layers)
        axes.set_xlabel("pair of a head's dims")
        axes.set_ylabel("layer")
        if frequencies:
            top = axes.secondary_xaxis("top")
            shown = range(0, pairs, max(1, pairs // 8))
            top.set_xticks([i + 0.5 for i in shown], [_wavelength(frequencies[i]) for i in shown])
            top.set_xlabel("turns once in so many tokens")
        figure.legend(handles=key, title="slots", loc="outside right upper")

    height = min(6.5, max(2.2, 1.2 + 0.12 * layers))
    said = (
        f"{layers} layers down, {pairs} pairs across from fast to slow; stronger cells have more slots, at most {most}."
    )
    return draw("slots", "RoPE slots by layer and frequency", said, height, paint)


def by_layer(name: str, title: str, description: str, lines: Mapping[str, Sequence[float | None]], unit: str) -> str:
    """Several figures of every layer, a line each; missing values leave gaps."""

    def paint(figure: Figure, axes: Axes) -> None:
        for index, (label, values) in enumerate(lines.items()):
            drawn = [math.nan if value is None else value for value in values]
            axes.plot(range(len(drawn)), drawn, label=label, **series(index))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("layer")
        axes.set_ylabel(unit)
        _whole_ticks(axes)
        figure.legend(loc="outside upper center", ncols=len(lines))

    return draw(name, title, description, 3.1, paint)


def sizes(parts: Mapping[str, Sequence[int]], source: int) -> str:
    """The numbers that each layer caches, as stacked bars, with the source's as a line above them."""

    def paint(figure: Figure, axes: Axes) -> None:
        bottom = [0] * len(next(iter(parts.values())))
        for index, (label, values) in enumerate(parts.items()):
            axes.bar(range(len(values)), values, bottom=bottom, width=0.8, color=colour(f"series-{index}"), label=label)
            bottom = [below + value for below, value in zip(bottom, values, strict=True)]
        axes.axhline(source, color=colour("ink"), linestyle=(0, (4, 2)), linewidth=1.0, label=f"source, {source}")
        axes.grid(visible=False, axis="x")
        axes.set_xlim(-0.6, len(bottom) - 0.4)
        axes.set_xlabel("layer")
        axes.set_ylabel("cached numbers a token")
        _whole_ticks(axes)
        figure.legend(loc="outside upper center", ncols=4)

    return draw(
        "sizes", "Cached numbers by layer", "Stacked bars, one a layer; a dashed line is the source.", 2.8, paint
    )


def lines(
    name: str,
    title: str,
    description: str,
    drawn: Sequence[Line],
    axis_labels: tuple[str, str],
    *,
    labels: Sequence[tuple[float, float, str]] = (),
    faint: Sequence[Line] = (),
    share: bool = False,
) -> str:
    """Lines through points, each with a name.

    Args:
        labels: (x, y, text) to be written beside points.
        faint: lines in the background, without markers.
        share: the horizontal axis is a share of 1.
    """

    def paint(figure: Figure, axes: Axes) -> None:
        for label, points in faint:
            axes.plot(*zip(*points, strict=True), color=colour("muted"), linewidth=0.9, label=label)
        for index, (label, points) in enumerate(drawn):
            axes.plot(*zip(*points, strict=True), label=label, **series(index, markersize=5.0))
        for x, y, text in labels:
            axes.annotate(text, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8)
        heights = [y for _, points in (*drawn, *faint) for _, y in points]
        if min(heights) > 0 and max(heights) > 20 * min(heights):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        if share:
            axes.set_xlim(0, 1.05)
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
        axes.margins(y=0.12)
        axes.set_xlabel(axis_labels[0])
        axes.set_ylabel(axis_labels[1])
        figure.legend(loc="outside lower center")

    return draw(name, title, description, 3.2 + 0.16 * len(drawn), paint)


def _runs(row: Sequence[int], layer: int, low: int, high: int) -> list[tuple[int, int, int, int]]:
    """The boxes (left, right, top, bottom) of neighbouring pairs whose count is within [low, high]."""
    runs: list[tuple[int, int, int, int]] = []
    for pair, count in enumerate(row):
        if not low <= count <= high:
            continue
        if runs and runs[-1][1] == pair:
            runs[-1] = (runs[-1][0], pair + 1, layer, layer + 1)
        else:
            runs.append((pair, pair + 1, layer, layer + 1))
    return runs


def _cells(boxes: Sequence[tuple[int, int, int, int]]) -> MarkedPath:
    """One path of boxes, each with a gap to the next layer."""
    from matplotlib.path import Path

    gap = 0.04
    corners, codes = [], []
    for left, right, top, bottom in boxes:
        corners += [(left, top + gap), (right, top + gap), (right, bottom - gap), (left, bottom - gap), (left, top)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return Path(corners, codes)


def _index_ticks(axis: XAxis | YAxis, count: int) -> None:
    """Ticks in the middle of cells, at most some eight, with the cells' numbers."""
    shown = range(0, count, max(1, math.ceil(count / 8)))
    axis.set_ticks([i + 0.5 for i in shown], [str(i) for i in shown])


def _whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _wavelength(frequency: float) -> str:
    """2π/ω in tokens, to two digits."""
    if frequency <= 0:
        return "∞"
    tokens = float(f"{2 * math.pi / frequency:.2g}")
    return f"{tokens:,.0f}" if tokens >= 10 else f"{tokens:g}"
