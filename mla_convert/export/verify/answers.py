"""What a model answers to a probe, whichever engine ran it, and how far two answers are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mla_convert.errors import VerificationError


@dataclass(frozen=True)
class Probe:
    """What every engine is asked.

    Attributes:
        prompt: token ids, at least two.
        new_tokens: how many tokens to continue greedily, whatever ends a text.
    """

    prompt: tuple[int, ...]
    new_tokens: int = 64


@dataclass(frozen=True)
class Answers:
    """What an engine made of a probe.

    Attributes:
        logprobs: log p of each prompt token after the first, given those before it, nats, [S - 1].
        continuation: the most probable tokens after the prompt, one after another.
        distributions: log p of every token of the vocabulary at each prompt position but the last, [S - 1, vocabulary];
            None where the engine does not say.
    """

    logprobs: Float[Tensor, " positions"]
    continuation: tuple[int, ...]
    distributions: Float[Tensor, "positions vocabulary"] | None = None


@dataclass(frozen=True)
class Difference:
    """How far an engine's answers are from the reference.

    Attributes:
        max_logprob_difference: max |Δ log p| over the prompt's tokens, nats.
        mean_logprob_difference: its mean.
        kl: mean KL(reference ‖ engine) over the prompt's positions, nats; None where one has no distributions.
        agreed: how many tokens of the continuation are the same before the first that differs.
        continuation: how many tokens the reference continues.
    """

    max_logprob_difference: float
    mean_logprob_difference: float
    kl: float | None
    agreed: int
    continuation: int


def compare_answers(found: Answers, reference: Answers) -> Difference:
    """Return how far ``found`` is from ``reference``.

    Raises:
        VerificationError: they are not of the same length, or a log-probability is not a number.
    """
    remedy = "file an issue with the conversion.json of the folder"
    if found.logprobs.shape != reference.logprobs.shape:
        raise VerificationError(
            f"the engine gave {tuple(found.logprobs.shape)} log-probabilities, expected "
            f"{tuple(reference.logprobs.shape)}",
            remedy,
        )
    difference = (found.logprobs.double() - reference.logprobs.double()).abs()
    if not bool(difference.isfinite().all()):
        raise VerificationError("the engine's log-probabilities are not finite numbers", remedy)
    return Difference(
        max_logprob_difference=float(difference.max()),
        mean_logprob_difference=float(difference.mean()),
        kl=_kl(reference.distributions, found.distributions),
        agreed=_agreed(found.continuation, reference.continuation),
        continuation=len(reference.continuation),
    )


def _kl(reference: Tensor | None, found: Tensor | None) -> float | None:
    if reference is None or found is None or reference.shape != found.shape:
        return None
    p, q = reference.double(), found.double()
    return float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean())


def _agreed(found: Sequence[int], reference: Sequence[int]) -> int:
    for count, (mine, theirs) in enumerate(zip(found, reference, strict=False)):
        if mine != theirs:
            return count
    return min(len(found), len(reference))
