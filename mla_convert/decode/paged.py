"""The latent cache in pages: sequences of any lengths in one pool, and shared beginnings stored and computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from mla_convert.decode.blocks import PAGE_TOKENS, BlockAllocator
from mla_convert.decode.rows import row_layout
from mla_convert.decode.views import AttendingStep, GatheredSequence
from mla_convert.errors import CacheFullError, UsageError
from mla_kernels.decode import mla_decode
from mla_kernels.fp8 import dequantize_latent, quantize_latent

CacheDtype = Literal["auto", "fp8"]


@dataclass(eq=False)
class CachedSequence:
    """A sequence of a :class:`PagedLatentCache`.

    Attributes:
        tokens: what is stored, in order.
        pages: where; the last may be partly filled.
        shared: how many of the tokens were there already when the sequence was opened.
    """

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    shared: int = 0


@dataclass(frozen=True)
class CacheStatistics:
    """What a cache has held since it was made.

    Attributes:
        page_tokens: tokens in a page.
        pages: pages in the pool.
        pages_used: the most pages that were held at once, a shared page counted once.
        pages_shared: how often a sequence took a page that was there instead of filling one.
        tokens_computed: tokens that went through the model.
        tokens_shared: tokens that did not, since their pages were there.
        bytes_per_page: over all layers.
        bytes_used: of ``pages_used``.
        bytes_pool: of the pool.
    """

    page_tokens: int
    pages: int
    pages_used: int
    pages_shared: int
    tokens_computed: int
    tokens_shared: int
    bytes_per_page: int
    bytes_used: int
    bytes_pool: int


class PagedLatentCache:
    """The cached rows [c_kv | k_rope] of every layer, [pages, 64, C+R] each, and who holds which page.

    A sequence is opened with its tokens, which gives it the pages that already hold a beginning of them; the rest is
    appended by running the model with one of the two caches made here, :meth:`prefilling` or :meth:`decoding`. Only
    full pages are shared and they are never written again, so nothing is ever copied. Sliding-window layers keep all
    their rows, as the others do.

    Args:
        config: of a native model (the sizes of its layers).
        pages: how many pages of 64 tokens.
        dtype: what the model computes in.
        cache_dtype: ``auto`` stores ``dtype``; ``fp8`` packed rows of 8-bit codes with a scale for every token and
            128 latent channels, their RoPE part in bfloat16. What is attended to is what is stored, in the prefill too,
            so that an answer does not depend on what was shared.

    Attributes:
        rows: each layer's layout.
        pool: all that is stored, in one piece.
        layers: views of it, each layer's pages [pages, 64, width].

    Raises:
        UsageError: there are no pages.
        CacheFullError: the device has no memory for so many.
    """

    def __init__(
        self,
        config: Any,
        pages: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        cache_dtype: CacheDtype = "auto",
    ) -> None:
        if pages < 1:
            raise UsageError(f"a cache of {pages} pages holds nothing", "give it at least one page")
        self.dtype = dtype
        self.fp8 = cache_dtype == "fp8"
        self.rows = tuple(
            row_layout(config.kv_rank_of(i), config.rope_dim_of(i), fp8=self.fp8)
            for i in range(config.num_hidden_layers)
        )
        stored = torch.uint8 if self.fp8 else dtype
        sizes = [pages * PAGE_TOKENS * row.width for row in self.rows]
        try:
            self.pool = torch.empty(sum(sizes), dtype=stored, device=device)
        except (RuntimeError, MemoryError) as error:
            raise CacheFullError(
                f"{device} has no memory for a cache of {pages} pages of {PAGE_TOKENS} tokens, "
                f"{sum(sizes) * stored.itemsize} bytes",
                "ask for fewer new tokens, or decode fewer prompts at once",
            ) from error
        self.layers = tuple(part.view(pages, PAGE_TOKENS, -1) for part in self.pool.split(sizes))
        self.allocator = BlockAllocator(pages, PAGE_TOKENS)
        self._peak = self._pages_shared = self._computed = self._shared = 0

    def open(self, tokens: Sequence[int]) -> CachedSequence:
        """Return a sequence that holds the known beginning of ``tokens``: whole pages, never the last token.

        The last token is left out since the model has to see one to say what follows.
        """
        pages = self.allocator.find(tokens[:-1])
        self.allocator.share(pages)
        shared = len(pages) * PAGE_TOKENS
        self._pages_shared += len(pages)
        self._shared += shared
        self._peak = max(self._peak, self.allocator.used)
        return CachedSequence(list(tokens[:shared]), pages, shared)

    def close(self, sequence: CachedSequence) -> None:
        """Give the sequence's pages back; full ones stay findable until they are needed."""
        self.allocator.release(sequence.pages)
        sequence.tokens, sequence.pages = [], []

    @contextmanager
    def prefilling(self, sequence: CachedSequence, tokens: Sequence[int]) -> Iterator[GatheredSequence]:
        """Give the cache to run the model with on ``tokens`` [1 S], which are appended when the block succeeds.

        It is one of transformers' own kind, so that the model attends as it does with any other.

        Raises:
            CacheFullError: there are not pages enough; nothing has changed.
        """
        with self._appending([sequence], [tokens]):
            slots = self._slots([sequence], len(tokens))
            yield GatheredSequence(self, slots, sequence.pages, len(sequence.tokens))

    @contextmanager
    def decoding(self, sequences: Sequence[CachedSequence], tokens: Sequence[Sequence[int]]) -> Iterator[AttendingStep]:
        """Give the cache to run the model with on ``tokens`` [B S], S more for each of the sequences.

        They are appended when the block succeeds. Positions have to be given to the model.

        Raises:
            CacheFullError: there are not pages enough; nothing has changed.
        """
        count = len(tokens[0])
        with self._appending(sequences, tokens):
            longest = max(len(sequence.pages) for sequence in sequences)
            table = [sequence.pages + [0] * (longest - len(sequence.pages)) for sequence in sequences]
            lengths = [len(sequence.tokens) + count for sequence in sequences]
            yield AttendingStep(self, self._slots(sequences, count), self._int32(table), self._int32(lengths))

    def write(self, layer: int, slots: Tensor, c_kv: Tensor, k_rope: Tensor) -> None:
        """Store the rows c_kv [n C] and k_rope [n R] of a layer at ``slots`` [n], page · 64 + place in the page."""
        layout = self.rows[layer]
        rows = layout.padded(torch.cat((c_kv, k_rope), dim=-1)).detach()
        if self.fp8:
            rows = quantize_latent(rows, layout.stored_rank)
        self.layers[layer].flatten(0, 1).index_copy_(0, slots, rows)

    def gather(self, layer: int, pages: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Return a copy of the first ``length`` rows in ``pages``: c_kv [length C] and k_rope [length R]."""
        where = torch.tensor(pages, dtype=torch.long, device=self.pool.device)
        layout = self.rows[layer]
        rows = self.layers[layer].index_select(0, where).flatten(0, 1)[:length]
        if self.fp8:
            rows = dequantize_latent(rows, layout.stored_rank, layout.stored_rope, dtype=self.dtype)
        return rows[..., : layout.rank], rows[..., layout.stored_rank :][..., : layout.rope_dim]

    def check_backend(self, backend: Literal["triton", "torch"], heads: int) -> None:
        """Attend to no tokens at all, so that a backend that cannot attend here fails before anything is computed.

        Raises:
            KernelError: it cannot.
        """
        table, length = self._int32([[0]]), self._int32([0])
        for layout, pages in dict(zip(self.rows, self.layers, strict=True)).items():  # each size once
            width = layout.stored_rank + layout.stored_rope
            query = torch.zeros(1, 1, heads, width, dtype=self.dtype, device=self.pool.device)
            mla_decode(query, pages, table, length, layout.stored_rank, 1.0, backend=backend)

    def statistics(self) -> CacheStatistics:
        """Return what the cache has held until now."""
        pages = self.allocator.pages
        per_page = self.pool.nbytes // pages
        return CacheStatistics(
            page_tokens=PAGE_TOKENS,
            pages=pages,
            pages_used=self._peak,
            pages_shared=self._pages_shared,
            tokens_computed=self._computed,
            tokens_shared=self._shared,
            bytes_per_page=per_page,
            bytes_used=per_page * self._peak,
            bytes_pool=self.pool.nbytes,
        )

    @contextmanager
    def _appending(self, sequences: Sequence[CachedSequence], tokens: Sequence[Sequence[int]]) -> Iterator[None]:
        """Hold the pages that the tokens need; keep them and count the tokens if the block succeeds, or let them go."""
        wanted = [
            pages_for(len(sequence.tokens) + len(new)) - len(sequence.pages)
            for sequence, new in zip(sequences, tokens, strict=True)
        ]
        fresh = iter(self.allocator.allocate(sum(wanted)))
        before = [len(sequence.pages) for sequence in sequences]
        for sequence, count in zip(sequences, wanted, strict=True):
            sequence.pages += islice(fresh, count)
        try:
            yield
        except BaseException:
            for sequence, kept in zip(sequences, before, strict=True):
                self.allocator.release(sequence.pages[kept:])
                del sequence.pages[kept:]
            raise
        self._peak = max(self._peak, self.allocator.used)
        for sequence, new in zip(sequences, tokens, strict=True):
            full = len(sequence.tokens) // PAGE_TOKENS
            sequence.tokens += new
            self._computed += len(new)
            for i in range(full, len(sequence.tokens) // PAGE_TOKENS):
                held = sequence.tokens[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS]
                self.allocator.register(sequence.pages[i], sequence.pages[i - 1] if i else None, held)

    def _slots(self, sequences: Sequence[CachedSequence], count: int) -> Tensor:
        """Where the next ``count`` rows of each sequence go, [B · count]."""
        slots = [
            sequence.pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
            for sequence in sequences
            for position in range(len(sequence.tokens), len(sequence.tokens) + count)
        ]
        return torch.tensor(slots, dtype=torch.long, device=self.pool.device)

    def _int32(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.pool.device)


def pages_for(tokens: int) -> int:
    """Return how many pages so many tokens need."""
    return -(-tokens // PAGE_TOKENS)
