"""Several conversions beside each other: what was measured of each, against what each caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mla_convert.errors import SourceError
from mla_convert.report import plots
from mla_convert.report.data import read_record
from mla_convert.report.page import page
from mla_convert.report.sections import Section, Table, figure, healing, measured_text, short

COLUMNS = ("model", "source", "recipe", "healing", "C + R", "cache", "bytes a token")
MEASURED_COLUMNS = ("text", "perplexity", "ln ratio", "KL", "top-1")


@dataclass(frozen=True)
class Measured:
    """A measurement that ``evaluate --record`` wrote down; the figures as conversion.json names them.

    Attributes:
        text: what it was made on; figures are comparable where this and ``text_sha256`` are the same.
    """

    text: str
    text_sha256: str | None
    perplexity: float | None
    source_perplexity: float | None
    log_ratio: float | None
    kl: float | None
    top1_agreement: float | None


@dataclass(frozen=True)
class Compared:
    """One conversion of a comparison.

    Attributes:
        model: the folder, as it was named.
        cached: C + R and key scales, the mean over layers.
        ratio: share of the source's cache.
    """

    model: str
    source: str
    recipe: str
    healing: str
    cached: float
    ratio: float
    bytes_per_token: int
    measurements: tuple[Measured, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it in JSON's own types."""
        return asdict(self)


def compare_folders(folders: Sequence[Path]) -> tuple[Compared, ...]:
    """Return what conversion.json says of every folder, in the given order.

    Raises:
        SourceError: a folder holds no conversion.
    """
    return tuple(_compared(folder) for folder in folders)


def _compared(folder: Path) -> Compared:
    record = read_record(folder)
    try:
        cache, layers = record["plan"]["cache"], record["source"]["num_layers"]
        return Compared(
            model=str(folder),
            source=record["source"]["ref"],
            recipe=record["recipe"].get("name", "–"),
            healing=healing(record).removeprefix("healed: ").removeprefix("not healed"),
            cached=cache["numbers_per_token"] / layers,
            ratio=cache["ratio"],
            bytes_per_token=cache["bytes_per_token"],
            measurements=tuple(_measured(row) for row in record["measurements"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"the record in {folder} cannot be compared: {type(error).__name__}: {error}",
            "name folders that convert or heal wrote",
        ) from error


def _measured(row: Mapping[str, Any]) -> Measured:
    figures = ("perplexity", "source_perplexity", "log_ratio", "kl", "top1_agreement")
    return Measured(measured_text(row), row.get("text_sha256"), *(row.get(name) for name in figures))


def rows(compared: Sequence[Compared]) -> Iterator[tuple[str, ...]]:
    """Yield table rows, one for each measurement; a conversion without any has one row."""
    for one in compared:
        own = (
            one.model,
            one.source,
            one.recipe,
            one.healing or "none",
            figure(one.cached),
            f"{one.ratio:.1%}",
            f"{one.bytes_per_token:,}",
        )
        if not one.measurements:
            yield (*own, "not measured", *("–",) * (len(MEASURED_COLUMNS) - 1))
        for row in one.measurements:
            ratio = "–" if row.log_ratio is None else f"{row.log_ratio:+.4f}"
            agreement = "–" if row.top1_agreement is None else f"{row.top1_agreement:.1%}"
            yield (*own, row.text, figure(row.perplexity), ratio, figure(row.kl), agreement)


def comparison_page(compared: Sequence[Compared]) -> str:
    """Return an HTML page with the plot of quality against cache and the table."""
    columns = (*COLUMNS, *MEASURED_COLUMNS)
    table = Section("table", "All figures", table=Table(columns, list(rows(compared))))
    said = (
        "ln(perplexity / the source's perplexity) on the same tokens: 0 is the source, lower is better. A line joins "
        "conversions measured on the same text."
    )
    drawn, labels = _drawn(compared)
    if drawn:
        plot = plots.lines(
            "quality",
            "Quality against cache",
            "A line a text; every point is a conversion, smaller caches to the left.",
            drawn,
            ("share of the source's cache", "ln(perplexity / source's)"),
            labels=labels,
            share=True,
        )
        quality = Section("quality", "Quality against cache", (said,), plot)
    else:
        nothing = "Nothing was measured. `mla-convert evaluate MODEL --against SOURCE --text FILE --record` does."
        quality = Section("quality", "Quality against cache", (nothing,))
    sources = list(dict.fromkeys(one.source for one in compared))
    subtitle = f"{len(compared)} conversions of {', '.join(sources)}."
    return page("Conversions compared", subtitle, (quality, table), wide=True)


def _drawn(compared: Sequence[Compared]) -> tuple[list[plots.Line], list[tuple[float, float, str]]]:
    """A line for each text, and the names of the points."""
    by_text: dict[tuple[str, str | None, str], list[tuple[float, float]]] = {}
    names: dict[tuple[float, float], list[str]] = {}
    several = len({one.source for one in compared}) > 1
    for one in compared:
        for row in one.measurements:
            if row.log_ratio is None:
                continue
            text = f"{row.text}, {short(one.source)}" if several else row.text
            by_text.setdefault((text, row.text_sha256, one.source), []).append((one.ratio, row.log_ratio))
            # Names of points that lie on one another would, too.
            names.setdefault((round(one.ratio, 2), round(row.log_ratio, 3)), []).append(short(one.model))
    labels = [(x, y, ", ".join(dict.fromkeys(found))) for (x, y), found in names.items()]
    return [(text, sorted(points)) for (text, _, _), points in by_text.items()], labels
