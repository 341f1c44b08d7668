"""What a run needs to go on where it was stopped: one file a checkpoint, whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mla_convert.errors import HealError, OutputError

FORMAT_VERSION = 1
_PATTERN = "step-*.safetensors"
_START_OVER = "repeat the run as it was, or start over: remove that folder, or choose another output"


@dataclass(frozen=True)
class Checkpoint:
    """One state of a run: `tensors`, and `state`, whatever else JSON can hold, after `step` steps."""

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run in a folder of its own.

    Attributes:
        folder: where they are; made when the first is saved.
        fingerprint: what the run starts from, by name (`fingerprint`); a run goes on only from one with the same.
    """

    folder: Path
    fingerprint: Mapping[str, str]

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write a checkpoint, then remove those before it. One that is not whole never takes an earlier one's place.

        Raises:
            OutputError: it cannot be written (a full disk); the last good one stays.
        """
        path = self.folder / f"step-{step:010d}.safetensors"
        temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
        metadata = {
            "version": str(FORMAT_VERSION),
            "step": str(step),
            "fingerprint": json.dumps(dict(self.fingerprint), sort_keys=True),
            "state": json.dumps(dict(state)),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, temporary, metadata)
            _sync(temporary)
            temporary.replace(path)
            _sync(self.folder)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise OutputError(
                f"the checkpoint {path} cannot be written: {error}",
                "free some disk space and repeat the command, which goes on from the last good checkpoint",
            ) from error
        for earlier in set(self.folder.glob(_PATTERN)) - {path}:
            earlier.unlink(missing_ok=True)
        for left in self.folder.glob(f".{_PATTERN}.partial-*"):
            left.unlink(missing_ok=True)

    def load(self) -> Checkpoint | None:
        """Return the latest checkpoint that can be read, on the CPU; None where there is none.

        Raises:
            HealError: it belongs to another run, and how the two differ; or there are some and none can be read.
        """
        found = sorted(self.folder.glob(_PATTERN), reverse=True)
        for path in found:
            with suppress(OSError, SafetensorError, KeyError, ValueError):
                return self._read(path)
        if found:
            raise HealError(f"no checkpoint in {self.folder} can be read", _START_OVER)
        return None

    def discard(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, path: Path) -> Checkpoint:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata["version"] != str(FORMAT_VERSION):
                raise HealError(f"{path} is a checkpoint of another version of mla-convert", _START_OVER)
            self._check(json.loads(metadata["fingerprint"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return Checkpoint(int(metadata["step"]), tensors, json.loads(metadata["state"]))

    def _check(self, found: Mapping[str, str]) -> None:
        names = sorted(found.keys() | self.fingerprint.keys())
        differing = [name for name in names if found.get(name) != self.fingerprint.get(name)]
        if not differing:
            return
        differences = "; ".join(
            f"{name}: {_shown(found.get(name))} then, {_shown(self.fingerprint.get(name))} now" for name in differing
        )
        raise HealError(f"{self.folder} holds checkpoints of another run ({differences})", _START_OVER)


def fingerprint(
    *, model: Mapping[str, str], teacher: str, settings: Any, texts: Mapping[str, str], **others: str
) -> dict[str, str]:
    """Return what two runs must share for one to go on from the other's checkpoints, each under a readable name.

    Args:
        model: digests of the model folder's weight files by name (`weight_digests`).
        teacher: the teacher's name.
        settings: the stage's frozen settings.
        texts: each text's digest by its name.
        others: anything else.
    """
    parts = {f"weights {name}": digest for name, digest in model.items()}
    parts |= {f"text {ref}": digest for ref, digest in texts.items()}
    parts |= {name: json.dumps(value) for name, value in asdict(settings).items()}
    return parts | {"teacher": teacher} | others


def weight_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every weight file of a model folder, by file name."""
    digests: dict[str, str] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _shown(value: str | None) -> str:
    if value is None:
        return "nothing"
    return f"{value[:12]}…" if len(value) == 64 else value


def _sync(path: Path) -> None:
    """Wait until the file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
