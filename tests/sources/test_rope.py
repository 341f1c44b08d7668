"""RoPE as adapters describe it, against the definitions: no number expected here comes from transformers."""

from __future__ import annotations

import cmath
import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.maths.rope import from_pairs, to_pairs
from mla_convert.sources.attention import AttentionWeights, rotate_half_order
from mla_convert.sources.llama import LlamaAdapter
from mla_convert.sources.phi3 import Phi3Adapter
from mla_convert.sources.rope import padded_rope
from mla_convert.spec import RopeSpec

THETA = 100.0
ROPES = {"whole": 8, "part": 4, "least": 2}


def _rope(rotary: int, head_dim: int, interleaved: bool) -> RopeSpec:
    """Pair l turns by THETA^(-2l / rotary) radians a position."""
    frequencies = [THETA ** (-2 * pair / rotary) for pair in range(rotary // 2)]
    return padded_rope(frequencies, head_dim, {"rope_type": "default"}, interleaved=interleaved)


def _heads(queries: list[list[float]], keys: list[list[float]], rope: RopeSpec) -> AttentionWeights:
    """Weights that map the n-th unit vector to the n-th query and the n-th key."""
    w_q, w_k = torch.tensor([queries]).mT, torch.tensor([keys]).mT
    return rotate_half_order(AttentionWeights(w_q, w_k, w_k, w_k[0].T[..., None], None, None, None, None), rope)


def _turned(vectors: torch.Tensor, rope: RopeSpec, position: int) -> torch.Tensor:
    """The columns of [K n] in rotate-half order, turned as the conversion turns them, [n K]."""
    angles = position * torch.tensor(rope.inv_freq, dtype=torch.float64)
    return from_pairs(to_pairs(vectors.mT) * torch.polar(torch.ones_like(angles), angles))


@pytest.mark.parametrize(
    ("rotary", "interleaved", "position", "vector", "expected"),
    [
        # Dims (0, 2) and (1, 3) are pairs, which turn by 2 and 0.2 radians: 1·e^2i and 2i·e^0.2i.
        (4, False, 2, [1.0, 0.0, 0.0, 2.0], [-0.4161468365, -0.3973386616, 0.9092974268, 1.9601331557]),
        # Dims (0, 1) and (2, 3) are pairs, with the same two numbers in them.
        (4, True, 2, [1.0, 0.0, 0.0, 2.0], [-0.4161468365, -0.3973386616, 0.9092974268, 1.9601331557]),
        # Dims (0, 2) hold 0 + 1i and (1, 3) hold 0 + 2i.
        (4, False, 2, [0.0, 0.0, 1.0, 2.0], [-0.9092974268, -0.3973386616, -0.4161468365, 1.9601331557]),
        # Dims (0, 1) turn by 1 radian; dims 2 and 3 are the halves of a pair that does not.
        (2, False, 1, [1.0, 0.0, 5.0, 7.0], [0.5403023059, 5.0, 0.8414709848, 7.0]),
    ],
)
def test_a_turned_vector_is_known(
    rotary: int, interleaved: bool, position: int, vector: list[float], expected: list[float]
) -> None:
    rope = _rope(rotary, 4, interleaved)
    turned = _turned(_heads([vector], [vector], rope).w_q[0], rope, position)
    assert turned[0].tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("interleaved", [False, True], ids=["rotate-half", "interleaved"])
@pytest.mark.parametrize("rotary", ROPES.values(), ids=ROPES)
def test_scores_are_those_of_the_source_layout(rotary: int, interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(2, 3, 8, generator=generator).tolist()
    rope = _rope(rotary, 8, interleaved)
    weights = _heads(queries, keys, rope)

    def by_definition(vector: list[float], position: int) -> list[float]:
        half = rotary // 2
        out = list(vector)
        for pair in range(half):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            turn = cmath.exp(1j * position * THETA ** (-2 * pair / rotary))
            turned = complex(vector[first], vector[second]) * turn
            out[first], out[second] = turned.real, turned.imag
        return out

    for at_query, at_key in ((0, 0), (5, 2), (31, 7)):
        found = _turned(weights.w_q[0], rope, at_query) @ _turned(weights.w_k[0], rope, at_key).mT
        for row, query in enumerate(queries):
            for column, key in enumerate(keys):
                both = zip(by_definition(query, at_query), by_definition(key, at_key), strict=True)
                # Frequencies and angles are float64 on both sides.
                assert found[row, column].item() == pytest.approx(sum(a * b for a, b in both), abs=1e-12)


# --- Scaled kinds: a head of 16 dims, base 10000, so that pair l turns by 10000^(-l/8) before any scaling ---


def _plain(pairs: int = 8) -> list[float]:
    return [10000.0 ** (-pair / pairs) for pair in range(pairs)]


def _read(**parameters: Any) -> RopeSpec:
    """The RoPE of a Llama of 256 positions."""
    rope = {"rope_theta": 10000.0, **parameters}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=256, rope_parameters=rope
    )
    return LlamaAdapter().rope(config, 16)


def _close(frequencies: Any, expected: list[float]) -> bool:
    """transformers computes frequencies in float32."""
    return list(frequencies) == pytest.approx(expected, rel=1e-6)


def test_linear_divides_every_frequency() -> None:
    # Position interpolation (arXiv:2306.15595): position s is seen as s / factor.
    rope = _read(rope_type="linear", factor=4.0)
    assert _close(rope.inv_freq, [frequency / 4 for frequency in _plain()])
    assert rope.attention_scaling == 1.0
    assert rope.update is None


def test_dynamic_changes_its_base_beyond_the_trained_length() -> None:
    # "Dynamic NTK" (arXiv:2309.00071, 3.3 and B): b·s^(K/(K - 2)), where s is 1 up to the trained length and the
    # share of it beyond; with a factor a, s = a·l/L - (a - 1).
    rope = _read(rope_type="dynamic", factor=2.0)
    assert _close(rope.inv_freq, _plain())
    update = rope.update
    assert update is not None
    assert (update.kind, update.original_positions, update.theta, update.factor) == ("dynamic", 256, 10000.0, 2.0)


def test_llama3_keeps_fast_pairs_and_slows_slow_ones() -> None:
    # Llama 3.1: wavelengths below L/4 stay, above L they grow by 8, and between they are mixed; L = 32.
    rope = _read(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    )
    expected = []
    for frequency in _plain():
        wavelength = 2 * math.pi / frequency
        if wavelength < 32 / 4:
            expected.append(frequency)
        elif wavelength > 32:
            expected.append(frequency / 8)
        else:
            share = (32 / wavelength - 1) / (4 - 1)
            expected.append((1 - share) * frequency / 8 + share * frequency)
    assert len({round(slow / fast, 6) for slow, fast in zip(expected, _plain(), strict=True)}) == 3
    assert _close(rope.inv_freq, expected)
    assert rope.attention_scaling == 1.0


def test_yarn_interpolates_pairs_that_turn_seldom() -> None:
    # YaRN (arXiv:2309.00071, 3.2 and its code): a ramp over the pairs, from the one that turns 32 times in L = 64
    # tokens to the one that turns once, rounded outwards and kept within the head; cos and sin grow by 0.1·ln(s) + 1.
    rope = _read(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)

    def pair_that_turns(times: float) -> float:
        return 8 * math.log(64 / (times * 2 * math.pi)) / math.log(10000.0)

    low, high = max(math.floor(pair_that_turns(32)), 0), min(math.ceil(pair_that_turns(1)), 15)
    expected = []
    for pair, frequency in enumerate(_plain()):
        interpolated = min(max((pair - low) / (high - low), 0.0), 1.0)
        expected.append(interpolated * frequency / 4 + (1 - interpolated) * frequency)
    assert 0 < high < 8
    assert _close(rope.inv_freq, expected)
    assert rope.attention_scaling == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_yarn_may_state_its_scaling_itself() -> None:
    rope = _read(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.25)
    assert rope.attention_scaling == 1.25


@pytest.mark.parametrize("rotary", [16, 12])
def test_longrope_has_a_set_of_frequencies_for_each_side_of_the_trained_length(rotary: int) -> None:
    # LongRoPE (arXiv:2402.13753) as in Phi-3: every pair is divided by a factor of its own, from one list up to L = 64
    # and from another beyond, and cos and sin grow by √(1 + ln(s) / ln(L)), s = 256 / 64.
    pairs = rotary // 2
    short, long = [1.0 + 0.1 * pair for pair in range(pairs)], [2.0 + 0.5 * pair for pair in range(pairs)]
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        pad_token_id=None,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": rotary / 16,
            "short_factor": short,
            "long_factor": long,
        },
    )
    rope = Phi3Adapter().rope(config, 16)
    plain = _plain(pairs)
    assert rope.dim == rotary
    assert _close(rope.inv_freq[:pairs], [frequency / by for frequency, by in zip(plain, short, strict=True)])
    assert rope.inv_freq[pairs:] == (0.0,) * (8 - pairs)
    update = rope.update
    assert update is not None
    assert (update.kind, update.original_positions) == ("longrope", 64)
    assert _close(update.inv_freq[:pairs], [frequency / by for frequency, by in zip(plain, long, strict=True)])
    assert not any(update.inv_freq[pairs:])
    scaling = math.sqrt(1 + math.log(4) / math.log(64))
    assert rope.attention_scaling == pytest.approx(scaling)
    assert rope.factors == pytest.approx((scaling,) * pairs + (1.0,) * (8 - pairs))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="RoPE type 'wavy'"):
        padded_rope([1.0, 0.1], 4, {"rope_type": "wavy"})


def test_an_odd_head_is_refused() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="5 dims"):
        padded_rope([1.0, 0.1], 5, {"rope_type": "default"})
