"""Pages of a cache: who holds them, which are free, and which already hold a given prefix. Counts only, no tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mla_convert.errors import CacheFullError

PAGE_TOKENS = 64
_BEGINNING = 0  # the identity of no tokens at all


@dataclass(eq=False)
class _Content:
    """What a full page holds: its tokens, behind the content that ``key`` starts with.

    Attributes:
        identity: a number of its own, never given twice. What was registered behind a content that is gone is then out
            of reach, without a search for it.
        pages: those that hold it; more than one where sequences came to the same tokens side by side.
    """

    identity: int
    key: tuple[int, tuple[int, ...]]
    pages: list[int]


class BlockAllocator:
    """Pages with reference counts, and a table that finds a page by the tokens in it and all tokens before it.

    A full page is registered under its own tokens and the identity of the page before it, so that the same tokens
    after another beginning are another page; the tokens themselves are compared, so that no two prefixes collide.
    Only full pages are registered, and a full page is never written again: sharing one copies nothing. A page that
    nobody holds any more stays findable until it is needed for something else; those free the longest go first.

    Args:
        pages: how many pages there are; they are numbered from 0.
        page_tokens: tokens in a page.
    """

    def __init__(self, pages: int, page_tokens: int = PAGE_TOKENS) -> None:
        self.pages = pages
        self.page_tokens = page_tokens
        self._references = [0] * pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages))
        self._contents: dict[tuple[int, tuple[int, ...]], _Content] = {}
        self._content_of: dict[int, _Content] = {}
        self._next_identity = _BEGINNING + 1

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many pages somebody holds, each counted once."""
        return self.pages - len(self._free)

    def references(self, page: int) -> int:
        """Return how many hold the page."""
        return self._references[page]

    def is_findable(self, page: int) -> bool:
        """Return whether :meth:`find` may return the page."""
        return page in self._content_of

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages that hold the longest known beginning of ``tokens``, whole pages only; takes none."""
        found: list[int] = []
        identity = _BEGINNING
        for start in range(0, len(tokens) - self.page_tokens + 1, self.page_tokens):
            content = self._contents.get((identity, tuple(tokens[start : start + self.page_tokens])))
            if content is None:
                break
            found.append(max(content.pages, key=self.references))
            identity = content.identity
        return found

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages that :meth:`find` returned, once more each."""
        for page in pages:
            self._references[page] += 1
            self._free.pop(page, None)

    def allocate(self, count: int) -> list[int]:
        """Hold ``count`` free pages and return them; what they held is no longer findable.

        Raises:
            CacheFullError: fewer are free; nothing has changed.
        """
        if count > len(self._free):
            raise CacheFullError(
                f"the cache needs {count} more pages of {self.page_tokens} tokens, and {len(self._free)} of its "
                f"{self.pages} are free",
                "give the cache more pages, or let it hold fewer or shorter sequences at once",
            )
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in taken:
            self._forget(page)
            self._references[page] = 1
        return taken

    def register(self, page: int, previous: int | None, tokens: Sequence[int]) -> None:
        """Make a page findable that now holds ``tokens``, behind the page ``previous`` (None: at the beginning).

        Raises:
            ValueError: nobody holds the page, it is not full, or it is registered already.
        """
        if not self._references[page] or len(tokens) != self.page_tokens or page in self._content_of:
            raise ValueError(f"page {page} cannot be registered with {len(tokens)} tokens")
        key = (_BEGINNING if previous is None else self._content_of[previous].identity, tuple(tokens))
        content = self._contents.get(key)
        if content is None:
            content = self._contents[key] = _Content(self._next_identity, key, [])
            self._next_identity += 1
        content.pages.append(page)
        self._content_of[page] = content

    def release(self, pages: Sequence[int]) -> None:
        """Let go of pages, once each. The last become reusable first, since a beginning is worth more than its end.

        Raises:
            ValueError: nobody holds one of them; nothing has changed.
        """
        if any(count > self._references[page] for page, count in Counter(pages).items()):
            raise ValueError(f"not all of the pages {list(pages)} are held")
        for page in reversed(pages):
            self._references[page] -= 1
            if not self._references[page]:
                self._free[page] = None

    def forget_free(self) -> None:
        """Make the pages that nobody holds unfindable: for when what they hold is no longer what a model computes."""
        for page in self._free:
            self._forget(page)

    def _forget(self, page: int) -> None:
        content = self._content_of.pop(page, None)
        if content is not None:
            content.pages.remove(page)
            if not content.pages:
                del self._contents[content.key]
