"""Arguments and options that several commands share, each with the help that all of them show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Dtype = Literal["float32", "bfloat16", "float16"]

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A model ID on the Hugging Face hub, a folder with config.json and safetensors files, a .gguf file, or "
        "builtin:smollm2-135m.",
        show_default=False,
    ),
]
ConvertedArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A folder that `mla-convert convert` wrote.", show_default=False)
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace OUT if it exists, once the new one is whole.")
]
RevisionOption = Annotated[
    str | None,
    typer.Option(metavar="REV", help="Branch, tag or commit of the model on the hub.", show_default=False),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN",
        envvar="HF_TOKEN",
        show_envvar=True,
        help="Access token for private and gated models on the hub.",
        show_default=False,
    ),
]
PushOption = Annotated[
    str | None,
    typer.Option(
        "--push-to-hub",
        metavar="REPO",
        help="Send OUT to this repository, owner/name, once it is written; see `mla-convert push`.",
        show_default=False,
    ),
]
PrivateOption = Annotated[
    bool, typer.Option("--private", help="Make the repository private; one that is public already is refused.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to standard output, and nothing else there.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show neither progress nor warnings.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log what is done to standard error, and tracebacks of failures.")
]
