"""The fused path of eager_decode: what is left to one operator, in how many parts, and when it must not be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import mla_kernels.eager
import mla_kernels.fused
from mla_kernels.eager import eager_decode
from mla_kernels.fused import can_fuse, fused_attention, parts_for
from mla_kernels.reference import reference_decode

RANK, ROPE_DIM, HEADS, PAGE = 48, 16, 5, 16
SCALE = 0.2
# float32 sums of some hundred terms.
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads, and parts of three tokens and more."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(mla_kernels.fused, "_PART_TOKENS", 3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fused_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of the operator was given."""
    counts: list[int] = []

    def counted(q: Tensor, kv: Tensor, rank: int, parts: int) -> tuple[Tensor, Tensor]:
        counts.append(kv.shape[1])
        return fused_attention(q, kv, rank, parts)

    monkeypatch.setattr(mla_kernels.eager, "fused_attention", counted)
    return counts


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_agrees(q: Tensor, cache: Tensor, table: Tensor | None, lengths: list[int], **options: int | bool) -> None:
    arguments = (q, cache, table, torch.tensor(lengths, dtype=torch.int32), RANK, SCALE)
    out, lse = eager_decode(*arguments, **options)  # type: ignore[arg-type]
    expected_out, expected_lse = reference_decode(*arguments, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(out.double(), expected_out, **CLOSE)
    torch.testing.assert_close(lse.double(), expected_lse, **CLOSE)


@pytest.mark.parametrize("parts", [1, 2, 6])
def test_parts_are_joined_exactly(parts: int) -> None:
    q, kv = random(2, 7, RANK + ROPE_DIM) * SCALE, random(2, 30, RANK + ROPE_DIM, seed=1)
    out, lse = fused_attention(q, kv, RANK, parts)
    scores = q.double() @ kv.double().transpose(1, 2)
    torch.testing.assert_close(out.double(), torch.softmax(scores, dim=-1) @ kv[..., :RANK].double(), **CLOSE)
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores, dim=-1, keepdim=True), **CLOSE)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("length", [1, 2, 3, 6, 7, 41])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [None, 5])
def test_every_token_is_counted_once_however_they_are_divided(length: int, queries: int, window: int | None) -> None:
    """Odd counts leave a token over, causal queries their last tokens, and windows their first."""
    q, kv = random(1, queries, HEADS, RANK + ROPE_DIM), random(1, 50, RANK + ROPE_DIM, seed=1)
    kv[:, length:] = torch.nan
    assert_agrees(q, kv, None, [length], **({} if window is None else {"window": window}))


@pytest.mark.usefixtures("two_threads")
def test_a_batch_has_its_threads_without_parts() -> None:
    assert [parts_for(batch, 100) for batch in (1, 2, 3)] == [2, 1, 1]
    assert parts_for(1, 2) == 1


@pytest.mark.parametrize(
    ("pages", "together"),
    [([3, 4, 5, 6], 55), ([3, 4, 6, 5], 2 * PAGE), ([6, 5, 4, 3], PAGE), ([3, 4, 5, 0], 3 * PAGE)],
    ids=["in order", "two in order", "backwards", "all but the last"],
)
def test_pages_in_order_are_read_where_they_lie(pages: list[int], together: int, fused_tokens: list[int]) -> None:
    q, pool = random(1, 1, HEADS, RANK + ROPE_DIM), random(8, PAGE, RANK + ROPE_DIM, seed=1)
    pool[pages[-1], 55 - 3 * PAGE :] = torch.nan
    table = torch.tensor([[*pages, 2147480000]], dtype=torch.int32)
    assert_agrees(q, pool, table, [55])
    assert fused_tokens == [together]


def test_pages_that_do_not_adjoin_are_gathered(fused_tokens: list[int]) -> None:
    wide = random(8, PAGE + 1, RANK + ROPE_DIM)
    table = torch.tensor([[3, 4]], dtype=torch.int32)
    assert_agrees(random(1, 1, HEADS, RANK + ROPE_DIM, seed=1), wide[:, :PAGE], table, [30])
    assert fused_tokens == []


def test_what_is_differentiated_or_of_another_dtype_is_not_fused() -> None:
    q, kv = random(1, 2, 64), random(1, 9, 64, seed=1)
    assert can_fuse(q, kv)
    assert not can_fuse(q, kv.bfloat16())
    assert not can_fuse(q, kv.requires_grad_())
    with torch.no_grad():
        assert can_fuse(q, kv)


def test_without_the_operator_nothing_is_fused(monkeypatch: pytest.MonkeyPatch, fused_tokens: list[int]) -> None:
    monkeypatch.setattr(mla_kernels.fused, "_ATTENTION", None)
    q, kv = random(1, 1, HEADS, RANK + ROPE_DIM), random(1, 50, RANK + ROPE_DIM, seed=1)
    assert_agrees(q, kv, None, [50])
    assert fused_tokens == []
