"""Attention with linear biases (Press, Smith and Lewis, 2022, https://arxiv.org/abs/2108.12409)."""

from __future__ import annotations


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope m of each head, whose score of a key d tokens back is lowered by m·d.

    Of n heads, a power of two, head i (from 1) has m = 2^(-8·i/n). Another number of heads takes the slopes of the
    power of two below it, and then every other slope, from the first on, of twice that power.
    """
    power = 1 << (heads.bit_length() - 1)
    exponents = [index / power for index in range(1, power + 1)]
    exponents += [(2 * index + 1) / (2 * power) for index in range(heads - power)]
    return tuple(2.0 ** (-8.0 * exponent) for exponent in exponents)
