"""Whether this project reads a source as transformers does: its own decoder against the family's class."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from mla_convert.errors import SourceError, VerificationError
from mla_convert.sources import Source

# Of |Δ log p|, nats. Both models compute in float32, in another order where the family's class fuses matrices, for
# which 1e-5 is usual; a part of the model that is left out or misplaced shows as more than 0.01.
READING_TOLERANCE = 1e-3


@torch.no_grad()
def reading_difference(source: Source, input_ids: Int[Tensor, "B S"]) -> float:
    """Return the largest |Δ log p| between the source's decoder and transformers' own class, nats, both in float32.

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
    found = source.load_decoder(dtype=torch.float32)(input_ids, use_cache=False).logits.double().log_softmax(-1)
    difference = float((found - reference).abs().max())
    if not difference <= READING_TOLERANCE:
        raise VerificationError(
            f"this project reads this {source.spec.architecture} otherwise than transformers: log-probabilities differ "
            f"by up to {difference:.3g}, allowed {READING_TOLERANCE:.3g}",
            "file an issue with the source's config.json; it cannot be converted meanwhile",
        )
    return difference
