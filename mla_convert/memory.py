"""How the process's allocator keeps memory."""

from __future__ import annotations

import ctypes
import sys

# mallopt(3): the options' numbers in glibc's malloc.h, the largest block taken from what was freed, and "never".
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 2**30
_NEVER = -1


def keep_freed_memory() -> None:
    """Have malloc keep what is freed for the next tensor of that size, where it is glibc's; elsewhere do nothing.

    A training step on a CPU frees and allocates the same large tensors over and over. By default each goes back to the
    system, and the next one's pages are made and zeroed again, which takes longer than computing what is in them.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
