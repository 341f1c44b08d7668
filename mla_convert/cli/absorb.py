"""``mla-convert absorb``: precompute the matrices that decoding uses, beside a converted model's weights."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from mla_convert.cli._options import ConvertedArgument, JsonOption, QuietOption, VerboseOption


def absorb(
    model: ConvertedArgument,
    merge: Annotated[
        Literal["auto", "never", "always"],
        typer.Option(help="Merge W_UV and W_O: auto merges where that is fewer bytes."),
    ] = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Precompute what a converted model decodes with.

    Writes absorbed.safetensors beside the weights: W_UK and W_UV of each head, laid out for decoding."""
    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as out:
        from mla_convert.decode import save_absorbed

        with out.progress() as progress:
            summary = save_absorbed(model, merge, progress)
        out.result(
            {
                "model": str(model),
                "file": str(summary.file),
                "merge": merge,
                "merged": summary.merged,
                "layers": summary.layers,
                "bytes": summary.nbytes,
                "weights_digest": summary.digest,
                "largest_error": summary.error,
            }
        )
        kept = "W_UV and W_O merged" if summary.merged else "W_UV kept apart from W_O"
        out.line(f"wrote {summary.file}: {summary.layers} layers, {kept}, {summary.nbytes:,} bytes")
        out.line(f"read back and compared with the weights: off by {summary.error:.2g} at most")
