"""``mla-convert plan``: what budgets of the cache give, whom they serve, what they take and are predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mla_convert.cli._options import (
    Dtype,
    JsonOption,
    QuietOption,
    RevisionOption,
    SourceArgument,
    TokenOption,
    VerboseOption,
)
from mla_convert.cli._units import duration, gigabytes, takes

if TYPE_CHECKING:
    from mla_convert.cli._console import Screen
    from mla_convert.spec import SourceSpec


def plan(
    source: SourceArgument,
    recipe: Annotated[
        str,
        typer.Option(metavar="RECIPE", help="default, fast, balanced, best, another recipe's name, or a YAML file."),
    ] = "default",
    budget_gb: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Memory for the cache, beside the weights, in units of 10^9 bytes: how many sequences fit.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens of a sequence.", show_default="the most that the source takes"),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences at once.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Of the cache.")] = "bfloat16",
    statistics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Predict what each budget costs, from what `convert --save-statistics` kept of this source; reads "
            "the weights.",
            show_default=False,
        ),
    ] = None,
    revision: RevisionOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show what budgets of the cache give and take, before a conversion.

    For each budget: the sizes, the cache of so many sequences of a length, how many fit into a memory, what the
    conversion takes, and with --statistics what it is predicted to cost. A layer with a sliding window holds no more
    tokens than that."""
    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as out:
        from mla_convert.errors import UsageError

        if budget_gb is not None and not 0 < budget_gb < float("inf"):
            raise UsageError(f"--budget-gb {budget_gb:g} is no memory", "give for example --budget-gb 8")

        from mla_convert.planning import Workload, plan_facts
        from mla_convert.recipe import load_recipe
        from mla_convert.sources import open_source

        method = load_recipe(recipe)
        opened = open_source(source, revision=revision, token=token)
        workload = Workload(
            context=opened.spec.max_position_embeddings if context is None else context,
            batch=batch,
            dtype=dtype,
            memory=None if budget_gb is None else round(budget_gb * 1e9),
        )
        with out.progress() as progress:
            facts = plan_facts(opened, method, workload, statistics, progress)
        out.result(facts)
        _show(out, facts, opened.spec)


def _show(out: Screen, facts: dict[str, Any], spec: SourceSpec) -> None:
    dtype, attention = facts["dtype"], facts["attention"]
    if attention is not None:
        out.table(
            f"{facts['source']}: {spec.num_heads} heads and {spec.num_kv_heads} KV heads of {spec.head_dim}, "
            f"{spec.num_layers} layers; MLA at {attention['cache']:g} of the cache",
            ("attention", "numbers a token and layer", f"bytes a token, {dtype}", "against MHA"),
            [_kind(cost, spec) for cost in attention["kinds"]],
        )
        out.line()
    columns = dict(_columns(facts, spec))
    before = {"cache": "source", **facts["before"], "disk_bytes": facts["before"]["weight_bytes"]}
    rows = [[_cell(row, name) for name in columns] for row in (before, *facts["budgets"])]
    divided = any(row.get("provisional") for row in facts["budgets"])
    title = f"budgets of the cache by recipe {facts['recipe']}"
    out.table(title + (", before calibration divides them" if divided else ""), tuple(columns.values()), rows)
    out.line()
    for note in _notes(facts, spec):
        out.line(note)


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _kind(cost: dict[str, Any], spec: SourceSpec) -> tuple[str, ...]:
    own = ", the source" if cost["kind"] == spec.attention_kind else ""
    change = f"{100 * cost['change']:+.2f} %"
    return (
        f"{cost['kind']}: {cost['formula']}{own}",
        f"{cost['elements']:,g}",
        f"{cost['bytes_per_token']:,}",
        change if cost["change"] else "",
    )


def _columns(facts: dict[str, Any], spec: SourceSpec) -> Iterator[tuple[str, str]]:
    """What is shown of each budget: the fact's name and the column's title."""
    yield from (("cache", "cache"), ("kv_ranks", "C (latent)"), ("rope_dims", "R (RoPE)"))
    if spec.key_scales:
        yield "key_scales", "scales"
    yield "cached_per_token_layer", "together"
    yield "cache_bytes_per_token", f"bytes a token, {facts['dtype']}"
    yield "cache_bytes", f"{facts['batch']:,} x {facts['context']:,} tokens"
    if facts["memory"] is not None:
        yield "sequences", f"sequences in {gigabytes(facts['memory'])}"
    if any(row.get("predicted_loss") is not None for row in facts["budgets"]):
        yield "predicted_loss", "predicted loss"
    yield from (("memory_bytes", "memory"), ("disk_bytes", "disk"), ("scratch_bytes", "scratch"))


def _cell(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return "-" if "error" in row else ""
    if isinstance(value, list):  # one for each layer
        return f"{min(value)} to {max(value)}" if min(value) < max(value) else f"{value[0]}"
    if name in ("cache_bytes", "memory_bytes", "disk_bytes", "scratch_bytes"):
        return gigabytes(value)
    if name == "predicted_loss":
        return f"{value:+.4f}"
    return f"{value:,g}" if isinstance(value, float) else value if isinstance(value, str) else f"{value:,}"


def _notes(facts: dict[str, Any], spec: SourceSpec) -> Iterator[str]:
    """What the figures are, and what they are not."""
    windowed = [window for window in spec.windows if window is not None]
    if windowed:
        yield (
            f"{len(windowed)} of {spec.num_layers} layers count with their sliding window of {max(windowed):,} tokens: "
            "transformers' cache drops what is past it, that of `mla-convert generate` for several prompts does not."
        )
    if facts["context"] > spec.max_position_embeddings:
        yield f"The source was made for {spec.max_position_embeddings:,} tokens; beyond them it answers ever worse."
    if any(row.get("predicted_loss") is not None for row in facts["budgets"]):
        yield (
            "Predicted loss: a prediction, not a measurement, of how much the loss rises on the calibration's text, in "
            "nats a token; to second order, each layer alone, before refits and healing. It ranks budgets, but is too "
            "low: on SmolLM2-135M by 3 times at 0.75 of the cache, 5 at 0.5 and 11 at 0.25 (docs/quality.md)."
        )
    else:
        yield "To have the loss predicted: `mla-convert convert --save-statistics FILE` once, then --statistics FILE."
    time = facts["time"]
    if time is not None:
        stages = ", ".join(f"{name} {duration(seconds)}" for name, seconds in time["stages"].items() if seconds)
        rate = f"{time['matmul_flops'] / 1e9:,.0f} billion a second"
        yield (
            f"A conversion to {time['cache']:g} takes an estimated {duration(time['seconds'])} here ({stages}): from "
            f"its operations, at the {rate} of a product that was measured now, on "
            f"{_threads(time['threads'])}; reading and writing files come on top."
        )
    yield f"{takes(facts['low_memory'])} For the source, disk is its files."
    problems = [row for row in facts["budgets"] if "error" in row]
    if problems:
        shares = ", ".join(str(row["cache"]) for row in problems)
        yield f"No sizes at {shares}: {problems[0]['error']}."
