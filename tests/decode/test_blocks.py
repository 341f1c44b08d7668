"""The page allocator: what is held, free and findable, over any course of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mla_convert.decode.blocks import BlockAllocator
from mla_convert.errors import CacheFullError

PAGES, SIZE = 7, 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Course(RuleBasedStateMachine):
    """Sequences of a two-letter alphabet come, grow and go; ``written`` is what each page was last filled with."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(PAGES, SIZE)
        self.sequences: list[tuple[list[int], list[int]]] = []  # tokens, pages
        self.written: dict[int, tuple[int, ...]] = {}  # page -> its tokens and all before them

    def state(self) -> object:
        pages = range(PAGES)
        found = [self.allocator.find(tokens) for tokens, _ in self.sequences]
        return [(self.allocator.references(p), self.allocator.is_findable(p)) for p in pages], found

    def allocate(self, count: int) -> list[int] | None:
        before, free = self.state(), self.allocator.free
        try:
            pages = self.allocator.allocate(count)
        except CacheFullError:
            assert count > free
            assert self.state() == before
            return None
        assert len(pages) == len(set(pages)) == count <= free
        held = {page for _, pages in self.sequences for page in pages}
        assert held.isdisjoint(pages)
        for page in pages:
            assert not self.allocator.is_findable(page)
            self.written.pop(page, None)
        return pages

    def fill(self, tokens: list[int], pages: list[int], known: int) -> None:
        for i in range(known, len(tokens) // SIZE):
            assert pages[i] not in self.written, "a full page is written again"
            self.written[pages[i]] = tuple(tokens[: (i + 1) * SIZE])
            self.allocator.register(pages[i], pages[i - 1] if i else None, tokens[i * SIZE : (i + 1) * SIZE])

    @rule(tokens=TOKENS)
    def come(self, tokens: list[int]) -> None:
        shared = self.allocator.find(tokens)
        assert len(shared) <= len(tokens) // SIZE
        for i, page in enumerate(shared):
            assert self.written[page] == tuple(tokens[: (i + 1) * SIZE])
        self.allocator.share(shared)
        fresh = self.allocate(-(-len(tokens) // SIZE) - len(shared))
        if fresh is None:
            self.allocator.release(shared)
            return
        self.fill(tokens, shared + fresh, len(shared))
        self.sequences.append((tokens, shared + fresh))
        # at once the next one finds all of it
        found = self.allocator.find(tokens)
        assert [self.written[page] for page in found] == [
            tuple(tokens[: (i + 1) * SIZE]) for i in range(len(tokens) // SIZE)
        ]

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), token=st.integers(0, 1))
    def grow(self, which: int, token: int) -> None:
        tokens, pages = self.sequences[which % len(self.sequences)]
        if len(tokens) % SIZE == 0:
            fresh = self.allocate(1)
            if fresh is None:
                return
            pages += fresh
        tokens.append(token)
        self.fill(tokens, pages, (len(tokens) - 1) // SIZE)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def go(self, which: int) -> None:
        tokens, pages = self.sequences.pop(which % len(self.sequences))
        self.allocator.release(pages)
        found = self.allocator.find(tokens)
        assert len(found) == len(tokens) // SIZE, "a page that nobody needs was forgotten"

    @rule()
    def forget(self) -> None:
        self.allocator.forget_free()
        assert not any(self.allocator.is_findable(p) for p in range(PAGES) if not self.allocator.references(p))

    @invariant()
    def counts_are_references(self) -> None:
        held = [page for _, pages in self.sequences for page in pages]
        assert [self.allocator.references(p) for p in range(PAGES)] == [held.count(p) for p in range(PAGES)]
        assert self.allocator.used == len(set(held))
        assert self.allocator.free + self.allocator.used == PAGES


Course.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)
TestCourse = Course.TestCase


def held(allocator: BlockAllocator, tokens: list[int]) -> list[int]:
    """Hold and register the pages of tokens that nobody holds yet."""
    size = allocator.page_tokens
    pages = allocator.allocate(len(tokens) // size)
    for i, page in enumerate(pages):
        allocator.register(page, pages[i - 1] if i else None, tokens[i * size : (i + 1) * size])
    return pages


def test_the_same_tokens_after_another_beginning_are_another_page() -> None:
    allocator = BlockAllocator(6, 2)
    first, second = held(allocator, [1, 1, 5, 5]), held(allocator, [2, 2, 5, 5])
    assert set(first).isdisjoint(second)
    assert allocator.find([1, 1, 5, 5, 9]) == first
    assert allocator.find([2, 2, 5, 5]) == second
    assert allocator.find([1, 1, 6, 5]) == first[:1]
    assert allocator.find([5, 5]) == []
    assert allocator.find([1]) == []


def test_what_was_free_the_longest_is_reused_first_and_ends_before_beginnings() -> None:
    allocator = BlockAllocator(5, 2)
    old, new = held(allocator, [1, 1, 2, 2]), held(allocator, [3, 3, 4, 4])
    allocator.release(old)
    allocator.release(new)
    assert allocator.allocate(1) == [4]  # the one that never held anything
    assert allocator.allocate(1) == [old[1]]
    assert allocator.find([1, 1, 2, 2]) == old[:1]
    assert allocator.allocate(2) == [old[0], new[1]]
    assert allocator.find([3, 3, 4, 4]) == new[:1]


def test_a_page_behind_one_that_was_reused_is_not_found_behind_its_successor() -> None:
    """The page of [2, 2] stays where it is; in front of it lies something else now."""
    allocator = BlockAllocator(3, 2)
    first, second = held(allocator, [1, 1, 2, 2])
    allocator.share([second])
    allocator.release([first, second])  # a beginning that is let go before its end
    assert allocator.allocate(2) == [2, first]
    allocator.register(first, None, [7, 7])
    assert allocator.find([7, 7, 2, 2]) == [first]


def test_of_twins_the_held_one_is_found_and_what_follows_either() -> None:
    allocator = BlockAllocator(4, 2)
    one, other = held(allocator, [1, 1]), held(allocator, [1, 1])
    assert one != other
    assert allocator.find([1, 1]) == one
    (following,) = allocator.allocate(1)
    allocator.register(following, other[0], [2, 2])
    assert allocator.find([1, 1, 2, 2]) == [*one, following]
    allocator.release(one)
    assert allocator.find([1, 1, 2, 2]) == [*other, following]
    allocator.forget_free()
    assert allocator.find([1, 1, 2, 2]) == [*other, following]


def test_exhaustion_says_what_is_missing_and_what_to_do() -> None:
    allocator = BlockAllocator(3, 2)
    allocator.allocate(2)
    with pytest.raises(CacheFullError, match="2 more pages of 2 tokens, and 1 of its 3") as raised:
        allocator.allocate(2)
    assert "more pages" in raised.value.remedy
    assert allocator.free == 1


def test_misuse_is_refused_and_changes_nothing() -> None:
    allocator = BlockAllocator(3, 2)
    (page,) = held(allocator, [1, 1])
    for pages in ([page, page], [page, 2], [2]):
        with pytest.raises(ValueError, match="held"):
            allocator.release(pages)
    for again in ((page, None, [1, 1]), (2, None, [1, 1])):
        with pytest.raises(ValueError, match="registered"):
            allocator.register(*again)
    (partial,) = allocator.allocate(1)
    with pytest.raises(ValueError, match="1 tokens"):
        allocator.register(partial, page, [1])
    assert [allocator.references(p) for p in (page, partial)] == [1, 1]
