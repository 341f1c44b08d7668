"""Converted layers in files beside the output until it is written: a run that is stopped goes on after the last one."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mla_convert.errors import OutputError
from mla_convert.mla import MLAWeights
from mla_convert.transform import ConvertedLayer

logger = logging.getLogger(__name__)


class LayerStore:
    """A folder of converted layers, a file each, with a digest of its numbers.

    Args:
        key: what the layers depend on, as text; files of another key count as absent.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self._key = hashlib.sha256(key.encode()).hexdigest()

    def save(self, index: int, layer: ConvertedLayer) -> None:
        """Keep a layer, in float32.

        Raises:
            OutputError: the disk is full, or cannot be written.
        """
        weights = layer.weights.to(torch.float32)
        tensors = {name: value for name, value in vars(weights).items() if isinstance(value, Tensor)}
        tensors["spectrum"] = layer.spectrum
        facts = {
            "key": self._key,
            "inv_freq": list(weights.inv_freq),
            "pairs": None if weights.pairs is None else list(weights.pairs),
            "errors": dict(layer.errors),
            "damping": layer.damping,
        }
        self._write(self._path(index), tensors, facts)

    def load(self, index: int) -> ConvertedLayer | None:
        """Return a layer, in float32; None where it is not kept, or damaged, or of another key."""
        path = self._path(index)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                facts: dict[str, Any] = json.loads((file.metadata() or {})["layer"])
                if facts["key"] != self._key:
                    return None
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            if _digest(tensors) != facts["digest"]:
                raise ValueError("its digest is another")
            spectrum = tensors.pop("spectrum")
            pairs = facts["pairs"]
            weights = MLAWeights(
                **tensors, inv_freq=tuple(facts["inv_freq"]), pairs=None if pairs is None else tuple(pairs)
            )
            return ConvertedLayer(weights, facts["errors"], facts["damping"], spectrum)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            logger.warning("converting layer %d again: %s is damaged (%s)", index, path, error)
            return None

    def save_streams(self, index: int, streams: tuple[Tensor, Tensor]) -> None:
        """Keep the hidden states before a layer.

        Raises:
            OutputError: the disk is full, or cannot be written.
        """
        source, converted = streams
        self._write(self._streams(index), {"source": source, "converted": converted}, {"key": self._key})

    def drop_streams(self, index: int) -> None:
        """Let go of the hidden states before a layer."""
        self._streams(index).unlink(missing_ok=True)

    def load_streams(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Return the hidden states before a layer; None where they are not kept, or damaged, or of another key."""
        path = self._streams(index)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                facts: dict[str, Any] = json.loads((file.metadata() or {})["layer"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            if facts["key"] != self._key or _digest(tensors) != facts["digest"]:
                return None
            return tensors["source"], tensors["converted"]
        except (OSError, SafetensorError, KeyError, ValueError):
            return None

    def _write(self, path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        temporary = path.with_name(f"{path.name}.partial-{os.getpid()}")
        tensors = {name: value.contiguous() for name, value in tensors.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, temporary, metadata={"layer": json.dumps(facts | {"digest": _digest(tensors)})})
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise OutputError(
                f"cannot keep what is done in {self.folder}: {error}", "free some disk space and run it again"
            ) from error

    def _streams(self, index: int) -> Path:
        return self.folder / f"streams.{index:05d}.safetensors"

    def _path(self, index: int) -> Path:
        return self.folder / f"layer.{index:05d}.safetensors"


def _digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of names, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()
