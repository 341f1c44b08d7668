"""Whether this project reads a source as transformers does: its own decoder against the family's class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from mla_convert.errors import SourceError, VerificationError
from mla_convert.mla import MLAForCausalLM
from mla_convert.sources import Source

# Of |Δ log p|, nats. Both models compute in float32, in another order where the family's class fuses matrices, for
# which 1e-5 is usual; a part of the model that is left out or misplaced shows as more than 0.01.
READING_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Reading:
    """The source's decoder in float32, and how it differs from transformers' class.

    Attributes:
        difference: the largest |Δ log p|, nats.
    """

    decoder: MLAForCausalLM
    difference: float


@torch.no_grad()
def checked_decoder(source: Source, input_ids: Int[Tensor, "B S"]) -> Reading:
    """Return the source's decoder, compared with transformers' own class on some tokens, both in float32.

    One of the two is in memory at a time.

    Raises:
        SourceError: transformers' class gives logits that are not finite.
        VerificationError: the difference is above READING_TOLERANCE.
    """
    reference = source.load_model(dtype=torch.float32)(input_ids, use_cache=False).logits.double().log_softmax(-1)
    if not bool(reference.isfinite().all()):
        raise SourceError(
            "the source's predictions are not finite",
            "check the source's weights; `mla-convert evaluate SOURCE` shows whether it answers at all",
        )
    decoder = source.load_decoder(dtype=torch.float32)
    found = decoder(input_ids, use_cache=False).logits.double().log_softmax(-1)
    difference = float((found - reference).abs().max())
    if not difference <= READING_TOLERANCE:
        raise VerificationError(
            f"this project reads this {source.spec.architecture} otherwise than transformers: log-probabilities differ "
            f"by up to {difference:.3g}, allowed {READING_TOLERANCE:.3g}",
            "file an issue with the source's config.json; it cannot be converted meanwhile",
        )
    return Reading(decoder, difference)
