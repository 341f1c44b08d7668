"""What a report shows, section by section: a sentence or two, a plot where there is one to draw, and the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from mla_convert.report import plots
from mla_convert.report.data import ReportData
from mla_convert.report.details import LayerDetails

_LONG_CELL = 40

# The errors of ConvertedLayer and of the refit: how a legend names each, and what it is.
_ERRORS = {
    "keys": ("keys", "what truncation loses of all keys before RoPE"),
    "values": ("values", "what truncation loses of all values"),
    "truncated": ("content", "what truncation loses of the content, in the metric of the factorisation"),
    "moved": (
        "rotations",
        "what is lost with the rotation of key components that have no slot, of all components' cost",
    ),
    "held_out": ("held-out content", "what truncation loses of text that took no part, in its Fisher information"),
    "attention": ("attention", "what the layer's attention is off by after the refit, on its text"),
}


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns' names, or of what there is a name for beside it where there are no columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def prose(self) -> bool:
        """Whether the cells of the last column are too long for a line."""
        return not self.columns or max((len(row[-1]) for row in self.rows), default=0) > _LONG_CELL


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        name: what a link goes to; unique in a page.
        text: paragraphs.
        plot: an ``<svg>`` element, or none.
        table: with a plot its numbers, which the page folds away; without one what the section shows.
        code: text to be shown as it is.
    """

    name: str
    title: str
    text: Sequence[str] = ()
    plot: str | None = None
    table: Table | None = None
    code: str | None = None


def sections(data: ReportData) -> tuple[Section, ...]:
    """Return the sections of a conversion's report; what there is nothing to say about is left out."""
    record = data.record
    found = (
        _source(record),
        _quality(record),
        _sizes(record),
        _spectra(data),
        _slots(data),
        _errors(record),
        *_healing(data),
        _timings(record),
        _verification(record),
        _recipe(record),
        _versions(record),
    )
    return tuple(section for section in found if section is not None)


def headline(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the few figures that a reader looks for first, each with what it is."""
    cache = record["plan"]["cache"]
    yield f"{cache['ratio']:.1%}", "of the source's cache"
    yield (
        f"{cache['bytes_per_token']:,}",
        f"bytes a token ({record['dtype']}); source {cache['source_bytes_per_token']:,}",
    )
    for row in record["measurements"][:2]:
        if row.get("log_ratio") is not None:
            yield f"{row['log_ratio']:+.3f}", f"ln(perplexity / source's) on {short(row['text'])}"


def healing(record: Mapping[str, Any]) -> str:
    """Which stages a conversion was healed by, in their order; `not healed` for none."""
    stages = [name for stage in record.get("healing", []) for name in ("layers", "global") if name in stage]
    return f"healed: {', '.join(stages)}" if stages else "not healed"


def short(ref: str) -> str:
    """The last part of a path or ID."""
    return ref.rstrip("/").rsplit("/", 1)[-1]


def figure(value: Any) -> str:
    """A cell of a table: floats to four significant digits."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def measured_text(row: Mapping[str, Any]) -> str:
    """What a measurement was made on: figures are comparable where this is the same."""
    return f"{short(row['text'])}, {row['tokens']:,} tokens in contexts of {row['context']}"


def _source(record: Mapping[str, Any]) -> Section:
    source, cache, layers = record["source"], record["plan"]["cache"], record["plan"]["layers"]
    attention = (
        f"{source['attention']}: {source['num_heads']} heads, {source['num_kv_heads']} KV heads of "
        f"{source['head_dim']}, {source['num_layers']} layers"
    )
    rows = [
        ("source", source["ref"] + (f" (revision {source['revision']})" if source.get("revision") else "")),
        ("architecture", source["architecture"]),
        ("attention", attention),
        ("special", "; ".join(source.get("special") or ()) or "nothing"),
        ("recipe", record["recipe"].get("name", "–")),
        ("format", f"{record['format']}, weights in {record['dtype']}"),
        ("latent rank C", _span([layer["kv_rank"] for layer in layers])),
        ("RoPE dim R", _span([layer["rope_dim"] for layer in layers])),
        ("numbers a token", f"{cache['numbers_per_token']:,}; source {cache['source_numbers_per_token']:,}"),
        ("bytes a token", f"{cache['bytes_per_token']:,}; source {cache['source_bytes_per_token']:,}"),
    ]
    used = ((name, record.get(name)) for name in ("calibration", "refit"))
    rows += [(name, f"{text['tokens']:,} tokens of {text['ref']}") for name, text in used if text]
    notes = tuple(record.get("notes") or ())
    return Section("source", "What was converted", notes, table=Table((), rows))


def _span(values: Sequence[int]) -> str:
    return f"{values[0]}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _quality(record: Mapping[str, Any]) -> Section:
    title, rows = "Perplexity against cache", record["measurements"]
    if not rows:
        said = "Nothing was measured yet. `mla-convert evaluate MODEL --against SOURCE --text FILE --record` does."
        return Section("quality", title, (said,))
    columns = {
        "text": "text",
        "context": "context",
        "tokens": "tokens",
        "source_perplexity": "source's perplexity",
        "perplexity": "perplexity",
        "log_ratio": "ln ratio",
        "kl": "KL, nats a token",
        "top1_agreement": "top-1 agreement",
    }
    table = Table(tuple(columns.values()), [[figure(row.get(name)) for name in columns] for row in rows])
    ratio = record["plan"]["cache"]["ratio"]
    drawn = [
        (measured_text(row), [(ratio, row["perplexity"]), (1.0, row["source_perplexity"])])
        for row in rows
        if row.get("perplexity") is not None and row.get("source_perplexity") is not None
    ]
    labels = [(1.0, points[1][1], "source") for _, points in drawn]
    plot = plots.lines(
        "quality",
        title,
        "A line a text, from the converted model at the left to the source at the right.",
        drawn,
        ("share of the source's cache", "perplexity"),
        labels=labels,
        share=True,
    )
    said = "Lower is better. The right end of each line is the source, at its whole cache, on the same tokens."
    return Section("quality", title, (said,), plot if drawn else None, table)


def _sizes(record: Mapping[str, Any]) -> Section:
    layers, source = record["plan"]["layers"], record["source"]
    parts = {
        "latent C": [layer["kv_rank"] for layer in layers],
        "RoPE key R": [layer["rope_dim"] for layer in layers],
        "key scales": [layer.get("key_scales", 0) for layer in layers],
    }
    parts = {name: values for name, values in parts.items() if any(values)}
    width = 2 * source["num_kv_heads"] * source["head_dim"]
    rows = [[str(i), *(str(values[i]) for values in parts.values())] for i in range(len(layers))]
    said = f"The source caches keys and values of {source['num_kv_heads']} KV heads: {width} numbers a token and layer."
    return Section("sizes", "Rank by layer", (said,), plots.sizes(parts, width), Table(("layer", *parts), rows))


def _spectra(data: ReportData) -> Section | None:
    layers = data.details.layers if data.details else ()
    if not layers or not all(layer.ranks for layer in layers):
        return None
    ranks = [layer["kv_rank"] for layer in data.record["plan"]["layers"]]
    shares = (0.1, 0.01, 0.001)
    rows = [
        [
            str(i),
            str(rank),
            figure(dict(zip(layer.ranks, layer.lost, strict=True)).get(rank)),
            *(str(_rank_at(layer, share)) for share in shares),
        ]
        for i, (layer, rank) in enumerate(zip(layers, ranks, strict=True))
    ]
    columns = ("layer", "C", "share lost at C", *(f"rank that loses {share:.1%}" for share in shares))
    said = (
        "The share of the content's energy, in the metric that the factorisation minimises, that a latent of rank c "
        "loses. Dots are the ranks that were chosen. `report.json` holds the curves."
    )
    return Section("spectra", "Spectra by layer", (said,), plots.spectra(layers, ranks), Table(columns, rows))


def _rank_at(layer: LayerDetails, share: float) -> int:
    """The least stored rank that loses at most a share."""
    return next(rank for rank, lost in zip(layer.ranks, layer.lost, strict=True) if lost <= share)


def _slots(data: ReportData) -> Section | None:
    details = data.details
    if details is None or not details.layers or not all(layer.slots for layer in details.layers):
        return None
    counts = [layer.slots for layer in details.layers]
    if not any(map(any, counts)):
        return None
    alike = details.frequencies[0] if len(details.frequencies) == 1 else None
    rows = [
        [str(i), str(sum(row)), ", ".join(f"{pair}" + (f" ×{n}" if n > 1 else "") for pair, n in enumerate(row) if n)]
        for i, row in enumerate(counts)
    ]
    said = (
        "Each RoPE slot of the shared key turns at the frequency of one pair of a source head's dims. Pairs further to "
        "the right turn more slowly. A pair keeps the rotation of as many key components as it has slots."
    )
    table = Table(("layer", "slots", "pairs with slots"), rows)
    return Section("slots", "RoPE slots by layer and frequency", (said,), plots.slots(counts, alike), table)


def _errors(record: Mapping[str, Any]) -> Section | None:
    layers = record.get("layer_errors") or ()
    names: list[str] = list(dict.fromkeys(name for layer in layers for name in layer))
    if not names:
        return None
    drawn: dict[str, list[float | None]] = {
        _ERRORS.get(name, (name, ""))[0]: [layer.get(name) for layer in layers] for name in names
    }
    plot = plots.by_layer(
        "errors", "Error by layer", "A line for each kind of error over the layers.", drawn, "share of energy lost"
    )
    dampings = record.get("dampings") or ()
    columns = ("layer", *drawn, *(("damping",) if dampings else ()))
    rows = [
        [str(i), *(figure(values[i]) for values in drawn.values()), *([figure(dampings[i])] if dampings else ())]
        for i in range(len(layers))
    ]
    known = (_ERRORS[name] for name in names if name in _ERRORS)
    said = "Shares of energy. " + "; ".join(f"`{label}`: {meaning}" for label, meaning in known) + "."
    return Section("errors", "Error by layer", (said,), plot, Table(columns, rows))


def _healing(data: ReportData) -> Iterator[Section]:
    """A section for each stage of each healing."""
    healings = data.record.get("healing", [])
    last = max((i for i, healing in enumerate(healings) if "global" in healing), default=None)
    for i, healing in enumerate(healings):
        number = f" ({i + 1})" if len(healings) > 1 else ""
        if results := healing.get("layers", {}).get("results"):
            yield _healed_layers(f"healing-{i}-layers", f"Healing layer by layer{number}", results)
        if "global" in healing:
            training = data.training_loss if i == last else ()
            yield _distilled(f"healing-{i}-global", f"Distillation{number}", healing["global"], training)


def _healed_layers(name: str, title: str, results: Sequence[Mapping[str, Any]]) -> Section:
    drawn = {
        "before": [layer["held_out_before"] for layer in results],
        "after": [layer["held_out_after"] for layer in results],
    }
    said = "Errors of each layer's attention output on held-out text, before and after its training."
    plot = plots.by_layer(name, title, said, drawn, "error, share of energy")
    columns = ("layer", "before", "after", "kept")
    rows = [
        [str(layer["layer"]), *(figure(layer[key]) for key in ("held_out_before", "held_out_after", "kept"))]
        for layer in results
    ]
    return Section(name, title, (said,), plot, Table(columns, rows))


def _distilled(name: str, title: str, course: Mapping[str, Any], training: Sequence[tuple[float, float]]) -> Section:
    measured = sorted((int(step), value) for step, value in course["held_out_kl"].items())
    plot = plots.lines(
        name,
        title,
        "The divergence on held-out text over the steps of training.",
        [("held-out text", measured)],
        ("optimiser step", "KL to the source, nats a token"),
        faint=[("training text, means of neighbouring steps", training)] if training else (),
    )
    said = (
        f"KL(source || model) on text kept apart; the weights of step {course['best_step']} were kept, after "
        f"{course['tokens']:,} tokens in all."
    )
    rows = [[str(step), figure(value)] for step, value in measured]
    return Section(name, title, (said,), plot, Table(("step", "KL, nats a token"), rows))


def _timings(record: Mapping[str, Any]) -> Section | None:
    timings = {name: seconds for name, seconds in (record.get("timings") or {}).items() if seconds is not None}
    for i, healing in enumerate(record.get("healing", [])):
        timings |= {f"heal {i + 1}: {name}": seconds for name, seconds in healing.get("timings", {}).items()}
    if not timings:
        return None
    rows = [[name, f"{seconds:,.1f}"] for name, seconds in timings.items()]
    total = f"{sum(timings.values()):,.1f}"
    return Section("timings", "Timings", table=Table(("stage", "seconds"), [*rows, ["together", total]]))


def _verification(record: Mapping[str, Any]) -> Section:
    rows = []
    if (difference := record.get("reading_difference")) is not None:
        rows.append(["reading of the source against transformers' class, |Δ log p| at most", figure(difference)])
    checked = record.get("verification") or {}
    rows += [[name.replace("_", " "), figure(value)] for name, value in checked.items() if not isinstance(value, dict)]
    if not rows:
        return Section("verification", "Verification", ("Nothing was compared.",))
    if record.get("healing"):
        said = "After healing the folder was loaded again, and holds the weights that were trained."
    elif checked:
        said = "The folder was loaded again and answers as the source's decoder around the converted attention does."
    else:
        said = "The folder was not loaded again."
    return Section("verification", "Verification", (said,), table=Table((), rows))


def _recipe(record: Mapping[str, Any]) -> Section:
    seeds = ", ".join(f"{name} {seed}" for name, seed in (record.get("seeds") or {}).items())
    text = (f"Seeds: {seeds}.",) if seeds else ()
    code = yaml.safe_dump(record["recipe"], sort_keys=False, allow_unicode=True)
    return Section("recipe", "Recipe", text, code=code)


def _versions(record: Mapping[str, Any]) -> Section:
    rows = [["mla-convert", record["tool"]["version"]]]
    rows += [[name, version] for name, version in record.get("libraries", {}).items()]
    digests = record["source"].get("digests", {})
    rows += [[f"sha256 of {name}", digest] for name, digest in digests.items()]
    return Section("versions", "Versions and inputs", table=Table((), rows))
