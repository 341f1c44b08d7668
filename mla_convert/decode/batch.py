"""Continue several prompts of a native model together on one paged cache."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_convert.decode.blocks import PAGE_TOKENS, BlockAllocator
from mla_convert.decode.paged import CachedSequence, PagedLatentCache, pages_for
from mla_convert.decode.sampling import Sampling
from mla_convert.errors import CacheFullError


@dataclass(eq=False)
class Continuation:
    """A prompt on its way.

    Attributes:
        index: its place among the prompts.
        prompt: its tokens.
        tokens: the new ones.
        seconds: from the start of its prefill to its last token.
    """

    index: int
    prompt: Sequence[int]
    generator: torch.Generator
    sequence: CachedSequence
    started: float
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0


class Batch:
    """Prompts that one model continues on one cache: prefilled one by one, decoded together.

    A prompt is let in, in the order given, when fewer than ``batch_size`` are on their way and the cache has room for
    all that those and it may come to hold; one that ends makes room at once.

    Args:
        model: a native model.
        on_token: called with a prompt's index and each of its new tokens.
    """

    def __init__(
        self,
        model: Any,
        cache: PagedLatentCache,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        end_tokens: frozenset[int],
        batch_size: int,
        on_token: Callable[[int, int], None] | None = None,
    ) -> None:
        self._model, self._cache, self._sampling, self._end_tokens = model, cache, sampling, end_tokens
        self._max_new_tokens, self._batch_size, self._on_token = max_new_tokens, batch_size, on_token
        self._running: list[Continuation] = []

    def run(self, prompts: Sequence[Sequence[int]]) -> list[Continuation]:
        """Return the continuations in the order of the prompts; the cache holds none of them when this ends.

        Raises:
            CacheFullError: a prompt with its new tokens does not fit into the cache by itself.
        """
        waiting = deque(enumerate(prompts))
        done: list[Continuation] = []
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._batch_size and self._has_room(waiting[0][1]):
                    self._prefill(*waiting.popleft())
                    done += self._retire()
                if self._running:
                    self._decode()
                    done += self._retire()
        finally:
            for left in self._running:
                self._cache.close(left.sequence)
            self._running = []
        return sorted(done, key=lambda continuation: continuation.index)

    def _has_room(self, prompt: Sequence[int]) -> bool:
        """Whether the cache can hold the prompt and its new tokens beside what those on their way may come to hold.

        Raises:
            CacheFullError: it cannot, and nothing is on its way that would make room.
        """
        allocator = self._cache.allocator
        found = allocator.find(prompt[:-1])
        held = sum(allocator.references(page) > 0 for page in found)
        needed = self._pages(prompt) - held
        promised = sum(self._pages(other.prompt) - len(other.sequence.pages) for other in self._running)
        if needed + promised <= allocator.free:
            return True
        if self._running:
            return False
        raise CacheFullError(
            f"a prompt of {len(prompt)} tokens and {self._max_new_tokens} new ones need {needed} pages of "
            f"{PAGE_TOKENS} tokens, and the cache has {allocator.free}",
            "give the cache more pages, or ask for fewer new tokens",
        )

    def _pages(self, prompt: Sequence[int]) -> int:
        """How many pages a prompt's sequence may come to need; its last new token is not stored."""
        return pages_for(len(prompt) + self._max_new_tokens - 1)

    def _prefill(self, index: int, prompt: Sequence[int]) -> None:
        sequence = self._cache.open(prompt)
        generator = self._sampling.generator(index, self._model.device)
        new = Continuation(index, prompt, generator, sequence, started=time.perf_counter())
        self._running.append(new)
        self._take([new], self._append_one(sequence, prompt[sequence.shared :]))

    def _decode(self) -> None:
        sequences = [continuation.sequence for continuation in self._running]
        last = [continuation.tokens[-1:] for continuation in self._running]
        if self._model.attention_mode == "expanded":
            logits = torch.cat([self._append_one(*one) for one in zip(sequences, last, strict=True)])
        else:
            with self._cache.decoding(sequences, last) as step:
                positions = torch.tensor([[len(sequence.tokens)] for sequence in sequences], device=self._model.device)
                logits = self._logits(last, positions, step)
        self._take(self._running, logits)

    def _append_one(self, sequence: CachedSequence, tokens: Sequence[int]) -> Tensor:
        """Run the model on more tokens of one sequence; returns the logits [1 vocabulary] after the last."""
        with self._cache.prefilling(sequence, tokens) as cache:
            start = len(sequence.tokens)
            positions = torch.arange(start, start + len(tokens), device=self._model.device)[None]
            return self._logits([tokens], positions, cache)

    def _logits(self, tokens: Sequence[Sequence[int]], positions: Tensor, cache: Any) -> Tensor:
        input_ids = torch.tensor(tokens, device=self._model.device)
        outputs = self._model(input_ids, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
        return outputs.logits[:, 0]

    def _take(self, continuations: Sequence[Continuation], logits: Tensor) -> None:
        chosen = self._sampling.choose(logits, [continuation.generator for continuation in continuations])
        for continuation, token in zip(continuations, chosen, strict=True):
            continuation.tokens.append(token)
            if self._on_token is not None:
                self._on_token(continuation.index, token)

    def _retire(self) -> list[Continuation]:
        """Take those that have ended off the batch and out of the cache, and return them."""
        ended = [
            continuation
            for continuation in self._running
            if len(continuation.tokens) >= self._max_new_tokens or continuation.tokens[-1] in self._end_tokens
        ]
        for continuation in ended:
            continuation.seconds = time.perf_counter() - continuation.started
            self._cache.close(continuation.sequence)
            self._running.remove(continuation)
        return ended


def pages_needed(prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int) -> int:
    """Return how many pages the prompts and their new tokens need at most, `batch_size` of them at once.

    What prompts begin with in common counts once, found as the cache will find it.
    """
    totals = [pages_for(len(prompt) + max_new_tokens - 1) for prompt in prompts]
    # Only the prompts' full pages can be shared; the others, which new tokens may need any number of, are only counted.
    plan = BlockAllocator(sum(len(prompt) // PAGE_TOKENS for prompt in prompts))
    needed = 0
    for prompt, total in zip(prompts, totals, strict=True):
        pages = plan.find(prompt[:-1])
        known, full = len(pages), len(prompt) // PAGE_TOKENS
        needed += total - known
        pages += plan.allocate(full - known)
        for i in range(known, full):
            plan.register(pages[i], pages[i - 1] if i else None, prompt[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS])
    return min(needed, sum(sorted(totals)[-batch_size:]))
