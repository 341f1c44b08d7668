"""``mla-convert push``: a finished folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_convert.cli._options import JsonOption, PrivateOption, QuietOption, TokenOption, VerboseOption
from mla_convert.cli._pushing import send, show_sent

if TYPE_CHECKING:
    from mla_convert.cli._console import Screen
    from mla_convert.hub import Shipment


def push(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A folder that convert, heal or export wrote.", show_default=False),
    ],
    repo: Annotated[
        str,
        typer.Argument(
            metavar="REPO", help="The repository as owner/name; made if it does not exist.", show_default=False
        ),
    ],
    private: PrivateOption = False,
    revision: Annotated[
        str | None,
        typer.Option(metavar="BRANCH", help="Write to this branch; made if it does not exist.", show_default="main"),
    ] = None,
    message: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The commit's message.", show_default="that a model was uploaded")
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace what the repository holds: other files than those of FOLDER are deleted."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the files and the card's metadata, and make no request.")
    ] = False,
    token: TokenOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Send a finished folder to the Hugging Face hub.

    All files appear there in one commit. An interrupted upload goes on when the command is run again: what is
    stored already is not sent again."""
    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as console:
        from mla_convert import hub

        shipment = hub.prepare(folder, repo)
        if dry_run:
            _show(console, shipment, private=private, revision=revision or "main")
            return
        access = hub.access_token(token)
        repository = hub.claim(repo, token=access, private=private, revision=revision, overwrite=overwrite)
        sent = send(console, shipment, repository, token=access, message=message)
        console.result({"folder": str(folder), **sent})
        show_sent(console, sent)


def _show(console: Screen, shipment: Shipment, *, private: bool, revision: str) -> None:
    import yaml

    total = sum(shipment.files.values())
    console.result(
        {
            "folder": str(shipment.folder),
            "repo": shipment.repo,
            "revision": revision,
            "private": private,
            "dry_run": True,
            "files": dict(shipment.files),
            "bytes": total,
            "metadata": dict(shipment.metadata),
            "notes": list(shipment.notes),
        }
    )
    title = f"{shipment.folder} to {shipment.repo}, {revision}, {'private' if private else 'public'}"
    rows = [(name, f"{size:,}") for name, size in shipment.files.items()]
    console.table(title, ("file", "bytes"), [*rows, (f"{len(rows)} files", f"{total:,}")])
    console.line()
    console.line(f"metadata of {shipment.repo}'s card")
    console.write(yaml.safe_dump(dict(shipment.metadata), sort_keys=False, allow_unicode=True))
    for note in shipment.notes:
        console.line(f"note: {note}")
