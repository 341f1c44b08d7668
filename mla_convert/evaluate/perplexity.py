"""Perplexity of a causal language model on windows of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_convert.evaluate.scoring import log_probabilities, scored_batches, scored_rows, target_parts
from mla_convert.positions import check_positions
from mla_convert.progress import Progress, silent


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        perplexity: exp(``nll_per_token``).
        nll_per_token: mean negative log-likelihood, nats a scored token.
        tokens: how many tokens were scored.
    """

    perplexity: float
    nll_per_token: float
    tokens: int

    @classmethod
    def of(cls, total_nll: float, tokens: int) -> Perplexity:
        """Return the perplexity of ``tokens`` scored tokens with a total of ``total_nll`` nats."""
        nll = total_nll / tokens
        # A float ends at e^709; a model that is worse than that has a perplexity all the same.
        return cls(math.exp(nll) if not nll > 709.0 else math.inf, nll, tokens)


@torch.inference_mode()
def perplexity(
    model: Any,
    windows: Tensor,
    *,
    batch_size: int = 1,
    progress: Progress | None = None,
    stride: int | None = None,
) -> Perplexity:
    """Return the model's perplexity on ``windows`` [n L]; ``model`` is in evaluation mode.

    Windows are disjoint contexts, or with ``stride`` one stream over which a context slides
    (`mla_convert.evaluate.scoring.scored_batches`). Log-likelihoods are computed in float64 whatever the model's dtype.
    The logits of ``batch_size`` contexts are held at a time.

    Raises:
        UsageError: a stride or batch size out of range, or windows longer than the model can read.
    """
    check_positions(model, windows.shape[1])
    report = progress or silent
    batches = scored_batches(windows, batch_size=batch_size, stride=stride)
    total_nll, tokens = 0.0, 0
    for done, batch in enumerate(batches, start=1):
        logits = model(input_ids=batch.input_ids.to(model.device), use_cache=False).logits
        rows, targets = scored_rows(logits, batch)
        for log_p, target in zip(log_probabilities(rows), target_parts(targets), strict=True):
            total_nll -= log_p.gather(1, target).sum().item()
        tokens += batch.tokens
        report("perplexity", done, len(batches))
    return Perplexity.of(total_nll, tokens)
