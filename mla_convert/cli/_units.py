"""Numbers as a reader sees them."""

from __future__ import annotations


def gigabytes(size: float) -> str:
    """Bytes, in units of 10^9."""
    return f"{size / 1e9:.3g} GB"


def duration(seconds: float) -> str:
    """A time, in the largest unit that it fills: it is an estimate, and no digit more is known."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.2g} {unit}"
    return f"{max(1.0, seconds):.0f} s"


def takes(low_memory: bool) -> str:
    """What the figures of memory, disk and scratch mean, under the way of working that this machine chooses."""
    way, other = ("a layer at a time", "--whole") if low_memory else ("on the whole model", "--low-memory")
    return (
        f"Memory, disk and scratch are what a conversion is expected to take, from sizes alone: working {way}, as this "
        f"machine would ({other} is the other way; --json gives both). Scratch lies beside the output until that is "
        "written."
    )
