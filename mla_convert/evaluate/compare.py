"""A model beside its reference: both perplexities, KL divergence and top-1 agreement in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import UsageError
from mla_convert.evaluate.perplexity import Perplexity
from mla_convert.evaluate.scoring import log_probabilities, scored_batches, scored_rows, target_parts
from mla_convert.positions import check_positions
from mla_convert.progress import Progress, silent


@dataclass(frozen=True)
class Comparison:
    """How far a model is from its reference on a text.

    Attributes:
        model, reference: perplexity of each.
        kl: mean over the scored tokens of KL(reference || model), nats a token.
        top1_agreement: the share of scored tokens for which both find the same token likeliest.
        tokens: how many tokens were scored.
    """

    model: Perplexity
    reference: Perplexity
    kl: float
    top1_agreement: float
    tokens: int

    @property
    def log_ratio(self) -> float:
        """ln(perplexity / reference perplexity): the nats a token that the model lost."""
        return self.model.nll_per_token - self.reference.nll_per_token


@torch.inference_mode()
def compare(
    model: Any,
    reference: Any,
    windows: Tensor,
    *,
    batch_size: int = 1,
    progress: Progress | None = None,
    stride: int | None = None,
) -> Comparison:
    """Return both models' perplexities and their agreement on ``windows`` [n L], as `perplexity` scores them.

    The models take turns batch by batch, so that the logits of one batch of each are all that is held; probabilities
    are computed in float64. Both are in evaluation mode and read the same token ids.

    Raises:
        UsageError: the vocabularies differ in size, a stride or batch size is out of range, or windows are longer than
            a model can read.
    """
    for one in (model, reference):
        check_positions(one, windows.shape[1])
    report = progress or silent
    batches = scored_batches(windows, batch_size=batch_size, stride=stride)
    model_nll = reference_nll = divergence = 0.0
    agreed = tokens = 0
    for done, batch in enumerate(batches, start=1):
        rows, targets = scored_rows(_logits(model, batch.input_ids), batch)
        reference_rows, _ = scored_rows(_logits(reference, batch.input_ids), batch)
        if rows.shape != reference_rows.shape:
            raise UsageError(
                f"the models' vocabularies differ: {rows.shape[-1]} and {reference_rows.shape[-1]} tokens",
                "compare with the model that was converted",
            )
        parts = zip(
            log_probabilities(rows),
            log_probabilities(reference_rows.to(rows.device)),
            target_parts(targets),
            strict=True,
        )
        for log_q, log_p, target in parts:
            model_nll -= log_q.gather(1, target).sum().item()
            reference_nll -= log_p.gather(1, target).sum().item()
            agreed += int((log_q.argmax(dim=-1) == log_p.argmax(dim=-1)).sum())
            divergence += _kl(log_p, log_q)
        tokens += batch.tokens
        report("comparison", done, len(batches))
    return Comparison(
        model=Perplexity.of(model_nll, tokens),
        reference=Perplexity.of(reference_nll, tokens),
        kl=divergence / tokens,
        top1_agreement=agreed / tokens,
        tokens=tokens,
    )


def _logits(model: Any, input_ids: Tensor) -> Tensor:
    return model(input_ids=input_ids.to(model.device), use_cache=False).logits


def _kl(log_p: Tensor, log_q: Tensor) -> float:
    """Return the sum over rows of Σ p (log p − log q), in nats; a token that p rules out adds nothing."""
    terms = log_p.exp() * (log_p - log_q)
    return terms.masked_fill_(log_p.isneginf(), 0.0).sum().item()
