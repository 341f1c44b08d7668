"""Padding: the answers stay what they were, to the last bit of the arithmetic that is shared."""

from __future__ import annotations

import pytest
import torch

from mla_convert.errors import FormatError
from mla_convert.export.padding import common_frequencies, pad_latent, place_slots, slot_places
from mla_convert.export.reference import PaperAttention
from mla_convert.mla import MLAWeights
from mla_convert.spec import RopeSpec
from tests.maths.samples import normal

SLOTS = (0.5, 0.25, 0.5)


def layer(*, biased: bool = False) -> MLAWeights:
    heads, nope, value, rank, rope, width = 3, 5, 4, 7, 2 * len(SLOTS), 12
    biases = {"b_dkv": normal(rank, seed=8), "b_kr": normal(rope, seed=9)} if biased else {}
    if biased:
        biases |= {"b_uq": normal(heads, nope, seed=10), "b_qr": normal(heads, rope, seed=11)}
    return MLAWeights(
        w_dkv=normal(rank, width, seed=1),
        w_kr=normal(rope, width, seed=2),
        w_uk=normal(heads, nope, rank, seed=3),
        w_uv=normal(heads, value, rank, seed=4),
        w_uq=normal(heads, nope, width, seed=5),
        w_qr=normal(heads, rope, width, seed=6),
        w_o=normal(width, heads, value, seed=7),
        inv_freq=SLOTS,
        **biases,
    )


def answer(weights: MLAWeights) -> torch.Tensor:
    class Spec:
        attention_scale = 0.3
        qk_norm = alibi_slopes = attention_softcap = None
        windows = (None,)
        alibi_rounded = False

        def rope_of(self, layer: int) -> RopeSpec:
            return RopeSpec(dim=6, inv_freq=SLOTS)

    return PaperAttention(weights, Spec(), 0)(normal(2, 9, 12, seed=12))[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("biased", [False, True])
def test_padding_does_not_change_what_a_layer_answers(biased: bool) -> None:
    plain = layer(biased=biased)
    padded = place_slots(pad_latent(plain, 10), (2.0, 0.5, 0.5, 0.25, 0.125))
    assert padded.shape.kv_rank == 10
    assert padded.shape.rope_dim == 10
    torch.testing.assert_close(answer(padded), answer(plain), rtol=0, atol=1e-12)


def test_a_latent_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="7 does not fit into 6"):
        pad_latent(layer(), 6)


def test_every_slot_needs_a_place_of_its_own() -> None:
    assert slot_places(SLOTS, (0.25, 0.5)) is None
    assert slot_places(SLOTS, (0.25, 0.5, 0.125)) is None
    assert slot_places(SLOTS, (0.25, 0.5, 0.5 * (1 + 1e-6))) == [1, 0, 2]
    with pytest.raises(FormatError, match="RoPE slots"):
        place_slots(layer(), (0.25, 0.5))


def test_common_frequencies_hold_every_layer_with_nothing_to_spare() -> None:
    layers = [(1.0, 0.5), (0.5, 0.5), (0.25, 1.0, 1.0)]
    common = common_frequencies(layers)
    assert common == (1.0, 1.0, 0.5, 0.5, 0.25)
    assert all(slot_places(slots, common) is not None for slots in layers)
