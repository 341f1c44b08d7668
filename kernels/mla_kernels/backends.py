"""Which implementation suits a device, and why: callers choose it and can say so."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch

from mla_kernels.errors import UnsupportedDeviceError
from mla_kernels.tiles import DEVICES, MAX_RANK, MAX_ROPE_DIM, MIN_RANK, Device

BackendName = Literal["triton", "torch", "reference"]
BACKENDS: tuple[BackendName, ...] = ("triton", "torch", "reference")
_REMEDY = 'use backend="torch"'


@dataclass(frozen=True)
class Backend:
    """A choice and its reason, for a log or a message."""

    name: BackendName
    reason: str


def choose_backend(
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    rank: int | None = None,
    rope_dim: int | None = None,
) -> Backend:
    """Return what suits tensors of ``device`` (and ``dtype``, latent rank and RoPE dims, where given)."""
    device = torch.device(device)
    if device.type != "cuda":
        return Backend("torch", f"the Triton kernel needs a GPU, and the tensors are on {device.type}")
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float32):
        return Backend("torch", f"the Triton kernel has no {dtype}")
    if rank is not None and not MIN_RANK <= rank <= MAX_RANK:
        return Backend("torch", f"the kernel has no tile for a latent rank of {rank}")
    if rope_dim is not None and rope_dim > MAX_ROPE_DIM:
        return Backend("torch", f"the kernel has no tile for {rope_dim} RoPE dims")
    try:
        found, _ = describe(device)
    except UnsupportedDeviceError as error:
        return Backend("torch", error.what)
    return Backend("triton", f"a GPU of architecture {found.arch}")


def interpreting() -> bool:
    """Return whether Triton's interpreter runs the kernels, on CPU tensors (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def describe(device: torch.device) -> tuple[Device, int]:
    """Return what the kernel needs to know of ``device``, and its number of multiprocessors.

    Raises:
        UnsupportedDeviceError: Triton is missing, or the device is no GPU or one that the kernel has no tiles for.
    """
    if find_spec("triton") is None:
        raise UnsupportedDeviceError("Triton is not installed", f"pip install triton (Linux), or {_REMEDY}")
    if device.type == "cpu" and interpreting():
        # Any device's tiles do; few multiprocessors keep the interpreter's grids small.
        return DEVICES[80], 2
    if device.type != "cuda":
        raise UnsupportedDeviceError(
            f"the Triton kernel needs a GPU, and the tensors are on {device.type}",
            f"{_REMEDY}, or set TRITON_INTERPRET=1 before triton is imported to interpret the kernel on a CPU",
        )
    return _describe_gpu(device.index if device.index is not None else torch.cuda.current_device())


@lru_cache
def _describe_gpu(index: int) -> tuple[Device, int]:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch: int | str = properties.gcnArchName.split(":")[0]
    else:
        arch = 10 * properties.major + properties.minor
    if arch not in DEVICES:
        known = ", ".join(str(known) for known in DEVICES)
        raise UnsupportedDeviceError(
            f"{properties.name} (architecture {arch}) is not among those that the kernel has tiles for: {known}",
            _REMEDY,
        )
    return DEVICES[arch], properties.multi_processor_count
