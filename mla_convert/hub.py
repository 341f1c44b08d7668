"""A finished folder on the Hugging Face hub: what would be sent, said without a request, and sent in one commit.

Large files are stored first, one after another, and the commit that names them comes last. So whoever loads the model
meanwhile finds all of it or nothing, and a run after an interrupted one sends only what is not stored yet.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_convert.card import CARD_NAME
from mla_convert.errors import HubError, OutputError, UsageError
from mla_convert.progress import Progress, silent
from mla_convert.record import RECORD_NAME

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# What `mla-convert absorb` makes of the weights, and makes again wherever the folder goes.
DERIVED = ("absorbed.safetensors",)

# In the remedies of what fails while files are sent.
AGAIN = "run the same command again"

_MAIN = "main"
_OF_THE_HUB = ".gitattributes"  # every repository begins with one
_SMALL = 2**24  # bytes; smaller files are asked about in one request
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Shipment:
    """What is to be sent.

    Attributes:
        repo: the repository, owner/name.
        files: path within the folder -> bytes.
        metadata: what the model card says to the hub.
        notes: what a reader of the repository will miss or should not see, a sentence each.
    """

    folder: Path
    repo: str
    files: Mapping[str, int]
    metadata: Mapping[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Repository:
    """A repository that may be written to.

    Attributes:
        head: the commit that the branch stands at.
        stale: the files that the next commit has to delete, unless it replaces them.
    """

    repo: str
    revision: str
    private: bool
    head: str | None
    stale: frozenset[str]


def check_repo(repo: str) -> None:
    """Check the name of a repository.

    Raises:
        UsageError: it is not owner/name.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UsageError(f"'{repo}' cannot name a repository on the hub", "give it as owner/name") from error
    if repo.count("/") != 1:
        raise UsageError(f"the repository '{repo}' has no owner", f"give it as owner/name, as in yourname/{repo}")


def prepare(folder: Path, repo: str) -> Shipment:
    """Return what of a finished folder is to be sent to ``repo``; makes no request.

    Raises:
        UsageError: ``repo`` is not owner/name.
        OutputError: the folder is not a finished one, or its model card cannot be read by the hub.
    """
    check_repo(repo)
    record = _record(folder)
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in DERIVED and not _private(path.relative_to(folder))
    }
    _check_whole(folder, files)
    metadata = _metadata(folder / CARD_NAME)
    return Shipment(folder, repo, files, metadata, _notes(record, metadata))


def access_token(token: str | None) -> str:
    """Return the access token to use: the one given, or the one that the hub's own client has.

    Raises:
        HubError: there is none.
    """
    from huggingface_hub import get_token

    found = token or get_token()
    if not found:
        raise HubError(
            "no access token for the hub",
            "run `hf auth login`, set HF_TOKEN or give --token; https://huggingface.co/settings/tokens makes tokens",
        )
    return found


def claim(repo: str, *, token: str, private: bool, revision: str | None = None, overwrite: bool = False) -> Repository:
    """Make the repository and the branch where they do not exist, and return how they stand.

    Args:
        private: only whom its owner lets may see it. One that is public already is refused.
        revision: the branch; ``main`` if None.
        overwrite: what is there may be replaced.

    Raises:
        UsageError: ``repo`` is not owner/name.
        HubError: no network, no permission, or it holds files and ``overwrite`` is not given.
    """
    from huggingface_hub import HfApi

    check_repo(repo)
    branch = revision or _MAIN
    api = HfApi(token=token)
    with _translated(repo, api):
        api.create_repo(repo, private=private or None, exist_ok=True)
        fresh = branch != _MAIN and _branch_off(api, repo, branch)
        info = api.model_info(repo, revision=branch)
    if private and info.private is False:
        raise HubError(f"{repo} is a public repository", "make it private in its settings, or leave --private out")
    found = frozenset(file.rfilename for file in info.siblings or ()) - {_OF_THE_HUB}
    if found and not (fresh or overwrite):
        shown = ", ".join(sorted(found)[:3]) + (", ..." if len(found) > 3 else "")
        raise HubError(
            f"{repo} holds {len(found)} files already, at {branch}: {shown}",
            "give another repository, or `mla-convert push` another branch or --overwrite, which deletes those files",
        )
    return Repository(repo, branch, bool(info.private), info.sha, found)


def push(
    shipment: Shipment,
    repository: Repository,
    *,
    token: str,
    message: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Send the files and return where they are: ``url``, ``commit``, ``revision``, ``private``, ``files``, ``bytes``.

    Raises:
        HubError: the hub refuses, or cannot be reached; nothing that others see has changed then.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    progress = progress or silent
    api = HfApi(token=token)
    total, done = sum(shipment.files.values()), 0
    small = [name for name, size in shipment.files.items() if size < _SMALL]
    groups = [small] * bool(small) + [[name] for name in shipment.files if name not in small]
    with _translated(shipment.repo, api):
        sent: list[CommitOperationAdd] = []
        for group in groups:
            additions = [CommitOperationAdd(name, shipment.folder / name) for name in group]
            api.preupload_lfs_files(shipment.repo, additions, revision=repository.revision, free_memory=False)
            sent += additions
            done += sum(shipment.files[name] for name in group)
            progress("upload, MB", done // 10**6, max(1, total // 10**6))
        stale = sorted(repository.stale - set(shipment.files))
        commit = api.create_commit(
            shipment.repo,
            [*sent, *(CommitOperationDelete(name) for name in stale)],
            commit_message=message or "Upload a model converted by mla-convert",
            revision=repository.revision,
            parent_commit=repository.head,  # or a commit of somebody else meanwhile would be overwritten
        )
    return {
        "repo": shipment.repo,
        "url": f"{api.endpoint}/{shipment.repo}",
        "revision": repository.revision,
        "private": repository.private,
        "commit": commit.oid,
        "files": len(shipment.files),
        "bytes": total,
        "deleted": stale,
        "notes": list(shipment.notes),
    }


def _record(folder: Path) -> Mapping[str, Any]:
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        return {"kind": record["source"]["kind"], "ref": record["source"]["ref"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"'{folder}' has no {RECORD_NAME} that can be read", "give a folder that convert, heal or export wrote"
        ) from error


def _private(path: Path) -> bool:
    """Whether a file is hidden, half-written or a cache of Python's."""
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _check_whole(folder: Path, files: Mapping[str, int]) -> None:
    """Check that there are weights, and every file of them that the index names."""
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"] if _INDEX in files else {}
        missing = sorted(set(index.values()) - set(files))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OutputError(f"{_INDEX} in '{folder}' cannot be read", "write the folder again") from error
    if missing:
        raise OutputError(f"'{folder}' lacks {missing[0]}, which {_INDEX} names", "write the folder again")
    if not any(name.endswith((".safetensors", ".gguf")) for name in files):
        raise OutputError(f"'{folder}' holds no weights", "give a folder that convert, heal or export wrote")


def _metadata(card: Path) -> dict[str, Any]:
    """What the card's front matter says, once the hub's own client can read it."""
    import yaml
    from huggingface_hub import ModelCard

    try:
        data = ModelCard(card.read_text(encoding="utf-8"), ignore_metadata_errors=False).data.to_dict()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise OutputError(
            f"the hub cannot read the metadata of {card}: {reason}",
            "correct what stands between its first two lines of dashes; `mla-convert evaluate --record` writes it anew",
        ) from error
    return data


def _notes(record: Mapping[str, Any], metadata: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    if "base_model" not in metadata:
        notes.append(f"{CARD_NAME} names no base_model, since the source was no model on the hub.")
    if "license" not in metadata:
        notes.append(f"{CARD_NAME} states no license, since the source stated none: add it under the licence you have.")
    if record["kind"] == "local":
        notes.append(f"{RECORD_NAME} and {CARD_NAME} name the source as it was given: {record['ref']}.")
    return tuple(notes)


def _branch_off(api: HfApi, repo: str, branch: str) -> bool:
    """Make the branch if there is none; return whether nothing was committed to it since it left main."""
    heads = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo).branches}
    if branch not in heads:
        api.create_branch(repo, branch=branch)
        return True
    return heads[branch] == heads.get(_MAIN)


@contextlib.contextmanager
def _translated(repo: str, api: HfApi) -> Iterator[None]:
    """Raise what the hub's client raises as errors that say what to do."""
    try:
        yield
    except (TypeError, AttributeError, NameError, LookupError):  # a fault of the program, not of the hub's
        raise
    except Exception as error:  # errors of the client's HTTP library come through too, and it differs by version
        raise _explained(error, repo, api.endpoint) from error


def _explained(error: Exception, repo: str, endpoint: str) -> HubError:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return HubError("HF_HUB_OFFLINE keeps the hub's client from the network", "unset HF_HUB_OFFLINE")
    again = f"{AGAIN}: what is stored already is not sent again"
    status, cause = _cause(error)
    said = next((line for line in map(str.strip, reversed(str(cause).splitlines())) if line), type(cause).__name__)
    if status is None:
        return HubError(f"sending to {endpoint} failed: {said}", f"check the network, then {again}")
    if status == 401:
        return HubError(
            "the hub does not accept the access token", "make one that may write, and give it to `hf auth login`"
        )
    if status == 403:
        return HubError(
            f"the access token may not write to {repo}", "use a token with write permission there, or another owner"
        )
    if status == 404:
        return HubError(f"the hub has no {repo} that the token may see", "check the owner's name and the token")
    if status in (409, 412):
        return HubError(f"{repo} was changed by somebody else meanwhile", "look at what is there, then " + again)
    if status == 429:
        return HubError("the hub has had too many requests", f"wait some minutes, then {again}")
    return HubError(f"the hub refused with status {status}: {said}", again)


def _cause(error: BaseException) -> tuple[int | None, BaseException]:
    """The HTTP status that an error, or what caused it, came with, and the one of them that says most."""
    while True:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return int(status), error
        if error.__cause__ is None:
            return None, error
        error = error.__cause__
