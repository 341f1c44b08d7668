"""``mla-convert convert``: from a source to a folder that holds the same model with latent attention."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mla_convert.cli._options import (
    Dtype,
    JsonOption,
    OverwriteOption,
    PrivateOption,
    PushOption,
    QuietOption,
    RevisionOption,
    SourceArgument,
    TokenOption,
    VerboseOption,
)
from mla_convert.cli._pushing import check_push, claim_for, push_written, show_sent

if TYPE_CHECKING:
    from mla_convert.cli._console import Screen
    from mla_convert.plan import ConversionPlan

CACHE_DTYPES = ("bfloat16", "float32")


def convert(
    source: SourceArgument,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The folder to write; it appears whole or not at all.", show_default=False),
    ],
    recipe: Annotated[
        str,
        typer.Option(metavar="RECIPE", help="default, fast, balanced, best, another recipe's name, or a YAML file."),
    ] = "default",
    set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Replace a value of the recipe, such as factorise.damping=0.2; may be given several times. "
            "`mla-convert recipes show NAME` says what there is.",
            show_default=False,
        ),
    ] = None,
    cache: Annotated[
        float | None,
        typer.Option(
            metavar="F",
            help="Share of the source's cache to keep: above 0, at most 1.",
            show_default="0.5; exact: 1.0",
        ),
    ] = None,
    kv_rank: Annotated[
        int | None,
        typer.Option(metavar="C", help="Width of the latent; instead of --cache, with --rope-dim.", show_default=False),
    ] = None,
    rope_dim: Annotated[
        int | None,
        typer.Option(metavar="R", help="Width of the shared RoPE key, even; with --kv-rank.", show_default=False),
    ] = None,
    format: Annotated[
        Literal["native", "deepseek"],
        typer.Option(help="native: this project's model class; deepseek: what stock transformers loads."),
    ] = "native",
    stock_rope: Annotated[
        Literal["default", "longrope"],
        typer.Option(
            help="RoPE of the deepseek format. default: frequencies that every engine computes; longrope: any "
            "frequencies, right in transformers only."
        ),
    ] = "default",
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A UTF-8 file, builtin:pydoc, or a dataset as ID[:CONFIG][@SPLIT][#COLUMN]; may be given several "
            "times.",
            show_default="builtin:pydoc",
        ),
    ] = None,
    calibration_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens to calibrate on.", show_default="the recipe's"),
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Use statistics that --save-statistics wrote; no calibration.", show_default=False
        ),
    ] = None,
    save_statistics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keep the calibration's statistics for other conversions.", show_default=False
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Seed of what is drawn of the texts.")
    ] = 0,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Write the weights in this dtype.", show_default="the source's")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest weight file, as 500MB or 5GB.")] = "5GB",
    low_memory: Annotated[
        bool | None,
        typer.Option(
            "--low-memory/--whole",
            help="Work on one layer of the model at a time, or hold all of it.",
            show_default="one layer at a time where the model would fill the memory",
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE",
            help="Where calibration and refits compute, as cpu, cuda or cuda:1; several share the calibration text.",
            show_default="cpu",
        ),
    ] = None,
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Heal in bfloat16, where the recipe heals and the hardware is fast at it.")
    ] = False,
    push_to_hub: PushOption = None,
    private: PrivateOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    overwrite: OverwriteOption = False,
    revision: RevisionOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Write a source as a model with latent attention.

    The conversion calibrates on text; the recipes balanced and best train on it besides. The cache is sized
    with --cache, or with --kv-rank and --rope-dim.
    """
    check_sizes(cache, kv_rank, rope_dim)

    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as console:
        check_push(push_to_hub, private)
        from mla_convert.export.folder import check_output
        from mla_convert.recipe import load_recipe

        load_recipe(recipe, tuple(set or ()))  # what can be refused before torch, which takes seconds to load
        if not dry_run:
            check_output(out, overwrite=overwrite)
        from mla_convert import pipeline
        from mla_convert.complete import convert_and_heal

        request = pipeline.ConvertRequest(
            source=source,
            out=out,
            recipe=recipe,
            overrides=tuple(set or ()),
            cache=cache,
            kv_rank=kv_rank,
            rope_dim=rope_dim,
            format=format,
            stock_rope=stock_rope,
            calibration=tuple(calibration or ()),
            calibration_tokens=calibration_tokens,
            seed=seed,
            dtype=dtype,
            overwrite=overwrite,
            revision=revision,
            token=token,
            statistics=statistics,
            save_statistics=save_statistics,
            max_shard_size=max_shard_size,
            low_memory=low_memory,
            devices=tuple(device or ()),
        )
        plan = pipeline.plan(request)
        facts = describe_plan(plan)
        if dry_run:
            pipeline.check_tokenizer(request)
            console.result({"source": source, "out": str(out), "dry_run": True, "plan": facts})
            _show_plan(console, source, facts)
            return
        console.if_interrupted(f"nothing was kept, and nothing is left of {out}", out)
        console.silence_loading()
        repository = claim_for(push_to_hub, private=private, token=token)
        with console.progress() as progress:
            record = convert_and_heal(request, progress, bf16=bf16)
        facts |= {"layers": record["plan"]["layers"], "provisional": False}
        result = {"source": source, "out": str(out), "plan": facts, "record": record}
        if repository is not None:
            result["pushed"] = push_written(console, out, repository, token)
        console.result(result)
        _show_plan(console, source, facts)
        _show_errors(console, record)
        _show_healing(console, record)
        _show_next(console, source, out)
        if repository is not None:
            show_sent(console, result["pushed"])


def check_sizes(cache: float | None, kv_rank: int | None, rope_dim: int | None) -> None:
    """Check the options that size the cache, as far as that is possible without the source.

    Raises:
        UsageError: two ways of sizing at once, half of one, or a value that no source could meet.
    """
    from mla_convert.errors import UsageError

    if cache is not None and (kv_rank is not None or rope_dim is not None):
        raise UsageError(
            "--cache and --kv-rank/--rope-dim both size the cache", "give --cache, or --kv-rank with --rope-dim"
        )
    if (kv_rank is None) != (rope_dim is None):
        given, missing = ("--kv-rank", "--rope-dim") if rope_dim is None else ("--rope-dim", "--kv-rank")
        raise UsageError(f"{given} is given without {missing}", f"add {missing}, or give --cache alone")
    if cache is not None and not 0 < cache <= 1:
        raise UsageError(f"--cache {cache} is not a share above 0 and at most 1", "give for example --cache 0.5")
    if kv_rank is not None and kv_rank < 1:
        raise UsageError(f"--kv-rank {kv_rank} leaves no latent", "give a rank of at least 1")
    if rope_dim is not None and (rope_dim < 0 or rope_dim % 2):
        raise UsageError(
            f"--rope-dim {rope_dim} is not an even number of at least 0",
            f"RoPE turns pairs: give for example --rope-dim {max(2, rope_dim + 1)}",
        )


def describe_plan(plan: ConversionPlan) -> dict[str, Any]:
    """Return a plan as ``convert --dry-run --json`` prints it.

    ``provisional``: the recipe divides the sum of C + R after calibration, and ``layers`` only stand for it.
    """
    from dataclasses import asdict

    return {
        "format": plan.format,
        "recipe": plan.recipe.name,
        "ratio": plan.ratio,
        "source_cached_per_token_layer": plan.source.kv_width,
        "cached_per_token_layer": plan.cached_per_token_layer,
        "source_cache_bytes_per_token": {dtype: plan.source_cache_bytes_per_token(dtype) for dtype in CACHE_DTYPES},
        "cache_bytes_per_token": {dtype: plan.cache_bytes_per_token(dtype) for dtype in CACHE_DTYPES},
        "layers": [asdict(shape) for shape in plan.layers],
        "heal": plan.recipe.to_dict().get("heal"),
        "provisional": plan.provisional,
    }


def _show_plan(console: Screen, source: str, facts: dict[str, Any]) -> None:
    before, after = facts["source_cache_bytes_per_token"], facts["cache_bytes_per_token"]
    change = f"{facts['ratio'] - 1:+.1%}"
    sizes = ", ".join(f"{letter} {_range(facts, name)}" for letter, name in (("C", "kv_rank"), ("R", "rope_dim")))
    title = f"{source} to {facts['format']}, recipe {facts['recipe']}: {sizes}"
    if facts["provisional"]:
        title += " before calibration"
    rows = [
        (
            "numbers a layer and token",
            facts["source_cached_per_token_layer"],
            f"{facts['cached_per_token_layer']:g}",
            change,
        ),
        *((f"bytes a token, {dtype}", f"{before[dtype]:,}", f"{after[dtype]:,}", change) for dtype in CACHE_DTYPES),
    ]
    console.table(title, ("cache", "before", "after", "change"), rows)
    if facts["heal"]:
        stages = [name for name in ("layers", "global") if name in facts["heal"]]
        console.line(f"the recipe heals after the conversion: {', then '.join(stages)}")


def _range(facts: dict[str, Any], name: str) -> str:
    sizes = [layer[name] for layer in facts["layers"]]
    return f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"


def _show_errors(console: Screen, record: dict[str, Any]) -> None:
    """Show the errors of the layers as conversion.json names them: the mean, and the worst with its layer."""
    layers = record["layer_errors"]
    if not layers:
        return
    rows = []
    for name in layers[0]:
        values = [layer[name] for layer in layers]
        worst = max(range(len(values)), key=values.__getitem__)
        rows.append((name, f"{sum(values) / len(values):.4f}", f"{values[worst]:.4f}", worst))
    console.line()
    console.table("shares lost, by the calibration's measure", ("", "mean", "worst", "in layer"), rows)


def _show_healing(console: Screen, record: dict[str, Any]) -> None:
    """Show what each stage of healing did on the text that it kept to check itself."""
    rows = []
    for stage in record.get("healing", []):
        if "layers" in stage:
            results = stage["layers"]["results"]
            before, after = (
                sum(layer[name] for layer in results) / len(results) for name in ("held_out_before", "held_out_after")
            )
            rows.append(("layers: error of attention outputs", f"{before:.4f}", f"{after:.4f}"))
        if "global" in stage:
            course = stage["global"]["held_out_kl"]
            rows.append(("global: KL to the source, nats", f"{course['0']:.4f}", f"{min(course.values()):.4f}"))
    if rows:
        console.line()
        console.table("healing, on text kept to check on", ("", "before", "after"), rows)


def _show_next(console: Screen, source: str, out: Path) -> None:
    console.line()
    from shlex import quote

    folder, against = quote(str(out)), quote(source)
    console.line(f"wrote {out}, with a report for a browser in {out / 'report.html'}; next:")
    console.line(f"  mla-convert evaluate {folder} --against {against} --text FILE")
    console.line(f"  mla-convert generate {folder} --prompt TEXT")
