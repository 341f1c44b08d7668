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
