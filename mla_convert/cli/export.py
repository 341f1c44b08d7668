"""``mla-convert export``: a converted model in the form that an engine loads, and proof that it answers alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mla_convert.cli._options import (
    ConvertedArgument,
    JsonOption,
    OverwriteOption,
    PrivateOption,
    PushOption,
    QuietOption,
    TokenOption,
    VerboseOption,
)
from mla_convert.cli._pushing import check_push, claim_for, push_written, show_sent

if TYPE_CHECKING:
    from mla_convert.cli._console import Screen
    from mla_convert.export.targets.target import ExportPlan

PythonOption = Annotated[
    Path | None,
    typer.Option(
        "--python",
        metavar="PYTHON",
        help="The interpreter of the environment that the engine is installed in.",
        show_default="this one",
    ),
]


def export(
    model: ConvertedArgument,
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="[OUT]",
            help="The folder to write; it appears whole or not at all. Not for --dry-run.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        Literal["transformers", "vllm", "sglang", "gguf"] | None,
        typer.Option(help="What is to load it; with --dry-run all of them where none is given.", show_default=False),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "q8_0"] | None,
        typer.Option(help="Store the weights in this dtype; q8_0 for gguf only.", show_default="as they are"),
    ] = None,
    form: Annotated[
        Literal["stock", "custom"] | None,
        typer.Option(
            help="Write this form or refuse: stock, an architecture that the engine has itself, or custom, this "
            "project's class.",
            show_default="the best that is exact",
        ),
    ] = None,
    kv_rank: Annotated[
        int | None,
        typer.Option(
            metavar="C", min=1, max=65536, help="Pad the latent with zeros to this width.", show_default="no padding"
        ),
    ] = None,
    rope_dim: Annotated[
        int | None,
        typer.Option(metavar="R", min=2, max=65536, help="Pad the RoPE key likewise; even.", show_default="no padding"),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Of safetensors files.")] = "5GB",
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Load what was written in the engine and compare its answers with the model's.",
        ),
    ] = True,
    python: PythonOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written and whether it is exact, and write nothing.")
    ] = False,
    push_to_hub: PushOption = None,
    private: PrivateOption = False,
    overwrite: OverwriteOption = False,
    token: TokenOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Write a converted model in the form that an engine loads.

    Engines misread checkpoints without a word, so what was written is loaded again and compared with the model; where
    the answers differ it is kept as OUT.rejected, and the command fails."""
    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as screen_:
        check_push(push_to_hub, private)
        from mla_convert.errors import UsageError
        from mla_convert.export.converted import open_converted
        from mla_convert.export.exporting import check_export, export_model, export_section, plan_exports
        from mla_convert.export.targets.target import ExportOptions

        if rope_dim is not None and rope_dim % 2:
            raise UsageError(f"--rope-dim {rope_dim} is odd", "an even number: two dims for every RoPE slot")
        options = ExportOptions(dtype, max_shard_size, kv_rank, rope_dim, form)
        opened = open_converted(model)
        if dry_run:
            plans = plan_exports(opened, options, target)
            screen_.result({"model": str(model), "plans": [export_section(plan, None) for plan in plans]})
            _show(screen_, plans)
            return
        if out is None or target is None:
            raise UsageError(
                "an export needs OUT and --target", "mla-convert export MODEL OUT --target vllm, or --dry-run"
            )
        screen_.silence_loading()
        if push_to_hub is not None:
            check_export(opened, out, target, options, verify=verify, python=python, overwrite=overwrite)
        repository = claim_for(push_to_hub, private=private, token=token)
        with screen_.progress() as progress:
            done = export_model(
                opened,
                out,
                target,
                options,
                verify=verify,
                python=python,
                overwrite=overwrite,
                progress=progress,
            )
        result: dict[str, Any] = {
            "model": str(model),
            "out": str(out),
            **export_section(done.plan, done.verdict),
        }
        if repository is not None:
            result["pushed"] = push_written(screen_, out, repository, token)
        screen_.result(result)
        _show(screen_, (done.plan,))
        screen_.line(f"wrote {out}")
        screen_.line("nothing was verified" if done.verdict is None else done.verdict.sentence())
        if repository is not None:
            show_sent(screen_, result["pushed"])


def _show(out: Screen, plans: tuple[ExportPlan, ...]) -> None:
    rows = []
    for plan in plans:
        kept = "" if plan.cache_bytes is None else f"{plan.cache_bytes:,}"
        sizes = "" if plan.form is None else f"{plan.kv_rank} + {plan.rope_dim}"
        answer = "refused" if plan.form is None else ("exact" if plan.exact else "not exact")
        rows.append((plan.target, plan.form or "", answer, plan.dtype, sizes, kept))
    out.table("exports", ("target", "form", "answers", "dtype", "C + R", "cache bytes a token"), rows)
    for plan in plans:
        for sentence in (*plan.reasons, *plan.notes):
            out.line(f"{plan.target}: {sentence}")
