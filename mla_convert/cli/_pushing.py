"""``--push-to-hub`` of the commands that write a folder: asked about before the work, sent once the folder is whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_convert.cli._console import Screen
    from mla_convert.hub import Repository, Shipment
    from mla_convert.progress import Progress


def check_push(push_to_hub: str | None, private: bool) -> None:
    """Check the options that say where the result is sent, without a request.

    Raises:
        UsageError: the repository is not owner/name, or there is none to make private.
    """
    from mla_convert.errors import UsageError

    if push_to_hub is not None:
        from mla_convert.hub import check_repo

        check_repo(push_to_hub)
    elif private:
        raise UsageError("--private is given without --push-to-hub", "add --push-to-hub owner/name")


def claim_for(push_to_hub: str | None, *, private: bool, token: str | None) -> Repository | None:
    """Make the repository that the result is to be sent to, if it is: a refusal after hours of work is worth less.

    Call it when whatever else can be refused at once has been, for the repository stays when the work fails.

    Raises:
        HubError: no access token, no network, no permission, or the repository holds files.
    """
    if push_to_hub is None:
        return None
    from mla_convert.hub import access_token, claim

    return claim(push_to_hub, token=access_token(token), private=private)


def push_written(console: Screen, out: Path, repository: Repository, token: str | None) -> dict[str, Any]:
    """Send what was written, and return what ``mla-convert push`` does.

    Raises:
        HubError: it was not sent. ``out`` stays, and the error says how to send it.
    """
    from mla_convert.errors import HubError, OutputError
    from mla_convert.hub import AGAIN, access_token, prepare

    later = f"mla-convert push {quote(str(out))} {quote(repository.repo)}"
    left = f"{out} is written; to send it: {later}"
    try:
        return send(console, prepare(out, repository.repo), repository, token=access_token(token), left=left)
    except (HubError, OutputError) as error:
        before, found, _ = error.remedy.partition(AGAIN)  # which would find that the output exists
        remedy = f"{before if found else f'{error.remedy}, then '}send it: {later}"
        raise HubError(f"{out} is written, but {error.message}", remedy) from error


def send(
    console: Screen,
    shipment: Shipment,
    repository: Repository,
    *,
    token: str,
    message: str | None = None,
    left: str | None = None,
) -> dict[str, Any]:
    """Send the files; where somebody watches, the hub's client draws its own bars, which know of parts of files.

    Args:
        left: what an interrupt leaves, besides what is on the hub.
    """
    from mla_convert import hub

    there = f"{shipment.repo} is as it was, and what is stored there is not sent again"
    console.if_interrupted(there if left is None else f"{there}; {left}")
    with contextlib.nullcontext() if console.interactive else _without_bars(console) as progress:
        return hub.push(shipment, repository, token=token, message=message, progress=progress)


@contextlib.contextmanager
def _without_bars(console: Screen) -> Iterator[Progress | None]:
    """Give the console's own progress, and turn the bars of the hub's client off meanwhile."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    off = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with console.progress() as progress:
            yield progress
    finally:
        if not off:
            enable_progress_bars()


def show_sent(console: Screen, sent: dict[str, Any]) -> None:
    """Say where the folder is now."""
    kind = "private" if sent["private"] else "public"
    console.line(f"sent {sent['files']} files, {sent['bytes']:,} bytes, to {sent['url']} ({sent['revision']}, {kind})")
    if sent["deleted"]:
        console.line(f"deleted there: {', '.join(sent['deleted'])}")
    for note in sent["notes"]:
        console.line(f"note: {note}")
