"""``mla-convert verify``: have an engine load an export, and compare its answers with the converted model's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mla_convert.cli._options import JsonOption, QuietOption, VerboseOption
from mla_convert.cli.export import PythonOption


def verify(
    exported: Annotated[
        Path, typer.Argument(metavar="OUT", help="A folder that `mla-convert export` wrote.", show_default=False)
    ],
    engine: Annotated[Literal["transformers", "vllm", "llamacpp"], typer.Option(help="What is to load it.")],
    python: PythonOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Ask an engine what an export answers.

    The export holds what the converted model answered when it was made, so this works wherever the engine is
    installed. Fails when the answers differ."""
    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as out:
        from dataclasses import asdict

        from mla_convert.errors import VerificationError
        from mla_convert.export.verify.checking import check, load_reference

        out.silence_loading()
        verdict = check(exported, load_reference(exported), engine, python)
        out.result({"model": str(exported), **asdict(verdict)})
        out.line(verdict.sentence())
        if not verdict.passed:
            raise VerificationError(
                f"{exported} does not answer in {engine} as the converted model does",
                "export the model again, and see docs/serving.md for what this engine misreads",
            )
