"""``mla-convert serve``: start the best engine that is installed on a converted or exported folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mla_convert.cli._options import JsonOption, QuietOption, VerboseOption


def serve(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A folder that convert, heal or export wrote, or a .gguf file.", show_default=False
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENT]...", help="Passed on to the engine as they are.", show_default=False),
    ] = None,
    engine: Annotated[
        Literal["vllm", "transformers", "llamacpp"] | None,
        typer.Option(help="What serves it.", show_default="the best that is installed and can"),
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Port to listen on.")] = 8000,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="Compute in this dtype, as the engine spells it.", show_default="as stored"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and do not run it.")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Serve a model over HTTP, with an OpenAI-compatible API.

    Prints the command and becomes it: vLLM where it is installed and can load the folder, else transformers; llama.cpp
    for GGUF files."""
    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as out:
        import os
        import shlex
        import shutil

        from mla_convert.serving.launch import look_at, serve_command

        command = serve_command(look_at(model), engine, host=host, port=port, dtype=dtype, extra=tuple(arguments or ()))
        out.result({"command": command})
        out.write(shlex.join(command) + "\n")
        if dry_run:
            return
        out.flush_result()
        program = shutil.which(command[0])
        os.execv(program or command[0], command)
