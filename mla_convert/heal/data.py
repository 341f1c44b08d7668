"""Text to heal on: training windows from several texts in equal shares, and held-out windows from their ends."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from mla_convert.calibrate.text import STREAMED_CHARS, Text, check_distinct, read_text, windows
from mla_convert.errors import TextError

# Characters read for a token that is wanted, where a text has no end in sight: more than any tokenizer needs.
_CHARS_PER_TOKEN = 8


@dataclass(frozen=True)
class HealingText:
    """Token windows of one length L, cut from the texts without gaps or overlaps.

    Attributes:
        train: the n windows that are trained on, each once.
        held_out: the m windows that are not, from the end of each text, the same number from each.
        order: rows of `train` in the order of training; the texts take turns, and a row comes again only after all
            others of its text.
        refs: the texts' names.
        digests: the SHA-256 of each text as used.
    """

    train: Int[Tensor, "n L"]
    held_out: Int[Tensor, "m L"]
    order: Int[Tensor, "t"]
    refs: tuple[str, ...]
    digests: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The SHA-256 of all token ids and their order: differs where the texts, the tokenizer or the seed do."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out, self.order):
            digest.update(repr(tuple(part.shape)).encode())
            digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()


def healing_text(
    tokenizer: Any,
    refs: Sequence[str],
    *,
    context: int,
    tokens: int,
    held_out_share: float,
    seed: int,
    passes: int = 1,
    held_out: int | None = None,
) -> HealingText:
    """Return windows of ``context`` tokens from the texts that ``refs`` name (see `calibrate.text.read_text`).

    Every text gives the same number of training windows, ``tokens`` tokens in all (rounded down), drawn by ``seed``
    without replacement, and its last windows are held out: ``held_out_share`` of its training windows or of the
    shortest text, whichever is less, and at least one. A dataset ends where no more of it is read.

    Args:
        tokens: training tokens, repetitions counted.
        held_out_share: between 0 and 1.
        passes: how often a window may be trained on, for texts shorter than their share.
        held_out: how many windows of each text are held out, instead of the share.

    Raises:
        TextError: a text cannot be read, is too short for its share (both in tokens), or is given twice; no texts,
            or a number out of range.
    """
    _check(refs, context=context, tokens=tokens, held_out_share=held_out_share, passes=passes)
    wanted = tokens // context // len(refs)
    limit = max(STREAMED_CHARS, _CHARS_PER_TOKEN * wanted * context)
    texts = [read_text(ref, max_chars=limit) for ref in refs]
    check_distinct(texts)
    cut = [windows(tokenizer, text.text, context=context) for text in texts]
    held = held_out or max(1, int(held_out_share * min(wanted, *(len(rows) for rows in cut))))
    for text, rows in zip(texts, cut, strict=True):
        _check_length(text, len(rows), held=held, wanted=wanted, passes=passes, context=context)

    generator = torch.Generator().manual_seed(seed)
    train: list[Tensor] = []
    orders: list[Tensor] = []
    used = 0
    for rows in cut:
        first = torch.randperm(len(rows) - held, generator=generator)[:wanted]
        turns = [torch.arange(len(first))]
        while sum(map(len, turns)) < wanted:
            turns.append(torch.randperm(len(first), generator=generator))
        train.append(rows[first])
        orders.append(used + torch.cat(turns)[:wanted])
        used += len(first)
    return HealingText(
        train=torch.cat(train),
        held_out=torch.cat([rows[-held:] for rows in cut]),
        order=torch.stack(orders, dim=1).flatten(),
        refs=tuple(text.ref for text in texts),
        digests=tuple(text.digest for text in texts),
    )


def _check(refs: Sequence[str], *, context: int, tokens: int, held_out_share: float, passes: int) -> None:
    if not refs:
        raise TextError("there is no text to heal on", "name at least one text")
    if not 0 < held_out_share < 1:
        raise TextError(f"a held-out share of {held_out_share} is not between 0 and 1", "give one such as 0.05")
    if passes < 1:
        raise TextError(f"{passes} passes over the text train on nothing", "give at least 1")
    if tokens < len(refs) * context:
        raise TextError(
            f"{tokens} tokens do not fill one context of {context} from each of {len(refs)} texts",
            f"give at least {len(refs) * context} tokens, a shorter context or fewer texts",
        )


def _check_length(text: Text, available: int, *, held: int, wanted: int, passes: int, context: int) -> None:
    needed = -(-wanted // passes) + held
    if available < needed:
        raise TextError(
            f"the text {text.ref} has {available * context} tokens in contexts of {context}, and {needed * context}"
            f" are needed: {wanted * context} to train on in at most {passes} passes, {held * context} held out",
            "give a longer text, fewer tokens, more passes or a shorter context",
        )
