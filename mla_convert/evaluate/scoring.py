"""Which tokens are scored in which context, so that every token counts exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_convert.errors import UsageError

# Rows of logits that are upcast at a time: bounds the float64 copies to rows x vocabulary.
_ROWS = 128


@dataclass(frozen=True)
class ScoredBatch:
    """Contexts of one length that go through the model together.

    Attributes:
        input_ids: [b L].
        first: in every context, the position of the first token that is scored (at least 1).
    """

    input_ids: Tensor
    first: int

    @property
    def tokens(self) -> int:
        """How many tokens the batch scores."""
        return self.input_ids.shape[0] * (self.input_ids.shape[1] - self.first)


def scored_batches(windows: Tensor, *, batch_size: int, stride: int | None) -> list[ScoredBatch]:
    """Return the batches that score the tokens of ``windows`` [n L].

    Without a stride the contexts are disjoint: each scores its L - 1 tokens that have a predecessor in it. With one,
    the windows are read as one stream over which a context of L tokens slides: the first scores L - 1 tokens, each
    later one its last ``stride``, and the last one what is left, so that n·L - 1 tokens are scored, each once.

    Raises:
        UsageError: the stride is not in 1 .. L - 1, or the batch size is below 1.
    """
    length = windows.shape[1]
    if batch_size < 1:
        raise UsageError(f"a batch size of {batch_size} holds nothing", "give a batch size of at least 1")
    if stride is None:
        return _batches(windows, first=1, batch_size=batch_size)
    if not 1 <= stride < length:
        raise UsageError(
            f"a stride of {stride} leaves tokens without context in windows of {length}",
            f"give a stride from 1 to {length - 1}",
        )
    stream = windows.reshape(-1)
    batches = _batches(stream[None, :length], first=1, batch_size=batch_size)
    later = stream[stride:].unfold(0, length, stride) if len(stream) >= length + stride else stream.new_empty(0, length)
    batches += _batches(later, first=length - stride, batch_size=batch_size)
    left = (len(stream) - length) % stride
    if left:
        batches += _batches(stream[None, -length:], first=length - left, batch_size=batch_size)
    return batches


def _batches(contexts: Tensor, *, first: int, batch_size: int) -> list[ScoredBatch]:
    return [ScoredBatch(batch, first) for batch in contexts.split(batch_size) if len(batch)]


def scored_rows(logits: Tensor, batch: ScoredBatch) -> tuple[Tensor, Tensor]:
    """Return the rows of ``logits`` [b L vocabulary] that predict the scored tokens, and those tokens: [m ..], [m]."""
    rows = logits[:, batch.first - 1 : -1].flatten(0, 1)
    targets = batch.input_ids[:, batch.first :].flatten().to(logits.device)
    return rows, targets


def log_probabilities(rows: Tensor) -> Iterator[Tensor]:
    """Yield the log-softmax of ``rows`` [m vocabulary] in float64, a bounded number of rows at a time."""
    for part in rows.split(_ROWS):
        yield part.to(torch.float64).log_softmax(dim=-1)


def target_parts(targets: Tensor) -> Iterator[Tensor]:
    """Yield ``targets`` [m] in the parts of `log_probabilities`, as columns [. 1]."""
    for part in targets.split(_ROWS):
        yield part.unsqueeze(1)
