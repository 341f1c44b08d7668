"""``mla-convert inspect``: what a source is, whether it converts, and what that takes, without reading its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mla_convert.cli._options import (
    JsonOption,
    QuietOption,
    RevisionOption,
    SourceArgument,
    TokenOption,
    VerboseOption,
)
from mla_convert.cli._units import gigabytes, takes

if TYPE_CHECKING:
    from mla_convert.cli._console import Screen
    from mla_convert.spec import SourceSpec


CACHE_DTYPES = ("bfloat16", "float32")


def inspect(
    source: SourceArgument,
    revision: RevisionOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show what a source is, whether it converts exactly, what can hold it then, and what cache budgets give.

    Reads the config and the tensors' names and shapes, no weights. A source that cannot be converted is an error that
    says why."""
    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as out:
        from mla_convert.budget import budget_facts, plan_budgets
        from mla_convert.memory import fills_memory
        from mla_convert.recipe import load_recipe
        from mla_convert.sources import open_source

        opened = open_source(source, revision=revision, token=token)
        budgets = plan_budgets(opened.spec, load_recipe("default"))
        size, by_layer = opened.file_bytes(), fills_memory(opened.num_weights())
        facts = describe(opened.spec) | {"source": source, "file_bytes": size, "low_memory": by_layer}
        facts["budgets"] = [
            budget_facts(budget, size, CACHE_DTYPES, by_layer=by_layer, mapped=opened.mapped()) for budget in budgets
        ]
        out.result(facts)
        _show(out, facts)


def describe(spec: SourceSpec) -> dict[str, Any]:
    """Return what a spec says about a model, in the names and nesting that ``inspect --json`` prints."""
    from mla_convert.export.obstacles import held_by
    from mla_convert.features import BELOW, FULL_RANK, cached_besides, features, rope_sentence
    from mla_convert.spec import DTYPE_BYTES

    rope = spec.rope
    numbers_a_token = spec.num_layers * spec.kv_width
    return {
        "architecture": spec.architecture,
        "family": spec.family,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "attention": {
            "kind": spec.attention_kind,
            "heads": spec.num_heads,
            "kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "scale": spec.attention_scale,
        },
        "rope": {
            "kind": rope.kind,
            "theta": rope.parameters.get("rope_theta"),
            "dim": rope.dim,
            "frequencies": len(rope.inv_freq),
            "layout": "interleaved" if rope.interleaved else "rotate_half",
            "said": rope_sentence(rope),
        },
        "special": list(features(spec)),
        "verdict": {"kind": "exact", "at": "full rank", "said": f"{FULL_RANK} {BELOW}"},
        "cached_besides": cached_besides(spec),
        "key_scales": spec.key_scales,
        "targets": {name: {"holds": not why, "reasons": list(why)} for name, why in held_by(spec).items()},
        "biases": {
            "query": spec.query_bias,
            "key": spec.key_bias,
            "value": spec.value_bias,
            "output": spec.output_bias,
            "mlp": spec.mlp_bias,
        },
        "tied_embeddings": spec.tie_word_embeddings,
        "windows": list(spec.windows),
        "dtype": spec.dtype,
        "cached_per_token_layer": spec.kv_width,
        "cache_bytes_per_token": {dtype: numbers_a_token * DTYPE_BYTES[dtype] for dtype in CACHE_DTYPES},
        "max_kv_rank": spec.max_kv_rank,
        "max_rope_dim": spec.max_rope_dim,
    }


def _show(out: Screen, facts: dict[str, Any]) -> None:
    attention, rope, cache = facts["attention"], facts["rope"], facts["cache_bytes_per_token"]
    biases = [name for name, present in facts["biases"].items() if present]
    windowed = [window for window in facts["windows"] if window is not None]
    full = (
        f"{attention['kind']}: {attention['heads']} heads, {attention['kv_heads']} KV heads of {attention['head_dim']}"
    )
    rows = [
        ("architecture", f"{facts['architecture']} ({facts['family']})"),
        ("attention", full),
        ("layers", facts["layers"]),
        ("RoPE", rope["said"]),
        ("special", "; ".join(facts["special"]) or "nothing"),
        ("biases", ", ".join(biases) or "none"),
        ("embeddings", "tied" if facts["tied_embeddings"] else "untied"),
        ("windows", f"{len(windowed)} layers, {windowed[0]} tokens" if windowed else "none"),
        ("weights", f"{facts['dtype']}, {facts['file_bytes']:,} bytes in files"),
        ("cached a layer and token", f"{facts['cached_per_token_layer']} numbers"),
        ("cache a token", f"{cache['bfloat16']:,} bytes in bfloat16, {cache['float32']:,} in float32"),
        ("conversion", f"{facts['verdict']['kind']} at {facts['verdict']['at']}"),
        *((("cached besides", facts["cached_besides"]),) if facts["cached_besides"] else ()),
        *_held(facts["targets"]),
    ]
    out.facts(str(facts["source"]), rows)
    out.line()
    total = "C + R + scales" if facts["key_scales"] else "C + R"
    columns = (
        "cache",
        "C (latent)",
        "R (RoPE)",
        total,
        "bytes a token, bfloat16",
        "float32",
        "exact",
        "memory",
        "disk",
        "scratch",
    )
    divided = any(budget.get("provisional") for budget in facts["budgets"])
    title = "what budgets give (default recipe" + (", before calibration divides them)" if divided else ")")
    out.table(title, columns, [_budget_row(budget) for budget in facts["budgets"]])
    out.line()
    out.line(facts["verdict"]["said"])
    out.line(takes(facts["low_memory"]))
    out.line("`mla-convert plan` says what budgets serve, how long they take, and what they are predicted to cost.")


def _held(targets: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """What can hold the converted model, and why the rest cannot, as rows; refusals of one reason together."""
    yield "can be held by", ", ".join(name for name, found in targets.items() if found["holds"])
    refusals: dict[str, list[str]] = {}
    for name, found in targets.items():
        if not found["holds"]:
            refusals.setdefault(" ".join(found["reasons"]), []).append(name)
    for reasons, names in refusals.items():
        yield f"not by {', '.join(names)}", reasons


def _budget_row(budget: dict[str, Any]) -> tuple[object, ...]:
    if "error" in budget:
        return (budget["cache"], *("-",) * 9)
    size = budget["cache_bytes_per_token"]
    sizes = (f"{size['bfloat16']:,}", f"{size['float32']:,}", "yes" if budget["exact"] else "no")
    needs = (gigabytes(budget[name]) for name in ("memory_bytes", "disk_bytes", "scratch_bytes"))
    return (budget["cache"], budget["kv_rank"], budget["rope_dim"], budget["cached_per_token_layer"], *sizes, *needs)
