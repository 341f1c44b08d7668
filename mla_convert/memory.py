"""How the process's allocator keeps memory, and what of a machine's a model may take."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import psutil

# Of the machine's memory, what a model in float32 may take to be worked on as a whole. Not of what is free just now:
# the same command must choose the same way again, for both ways add up floats in an order of their own.
RESIDENT_SHARE = 0.4

# mallopt(3): the options' numbers in glibc's malloc.h, the largest block taken from what was freed, and "never".
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 2**30
_NEVER = -1


def fills_memory(num_weights: int) -> bool:
    """Whether so many weights are to be worked on a layer at a time on this machine, unless something else is asked."""
    return 4 * num_weights > RESIDENT_SHARE * psutil.virtual_memory().total


def keep_freed_memory() -> None:
    """Have malloc keep what is freed for the next tensor of that size, where it is glibc's; elsewhere do nothing.

    A training step on a CPU frees and allocates the same large tensors over and over. By default each goes back to the
    system, and the next one's pages are made and zeroed again, which takes longer than computing what is in them.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def release_freed_memory() -> None:
    """Give back to the system what is freed but kept, where malloc is glibc's: between stages of unlike tensors."""
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Any:
    """A function of the C library by its name, or None where there is no such function or the system is not Linux."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
