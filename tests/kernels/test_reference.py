import math

import pytest
import torch

from mla_kernels.fp8 import dequantize_latent, quantize_latent
from mla_kernels.reference import reference_decode
from tests.kernels.layouts import decode_case

# Two float64 evaluations of sums of at most a few hundred terms.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def torch_attention(q, tokens, rank, scale, visible):
    """torch's attention in float64 for one sequence: q [Sq, H, d] over tokens [T, d] where `visible` [Sq, T]."""
    key = tokens.double()[None].expand(q.shape[1], -1, -1)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.double().transpose(0, 1), key, key[..., :rank], attn_mask=visible, scale=scale
    )
    return out.transpose(0, 1)


def test_two_tokens_by_hand():
    """q·k is 0 and 2; with scale ½ the weights are 1/(1+e) and e/(1+e)."""
    q = torch.tensor([[[[0.0, 1.0, 1.0]]]])
    kv = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]])
    out, lse = reference_decode(q, kv, None, torch.tensor([2], dtype=torch.int32), 2, 0.5)
    torch.testing.assert_close(
        out[0, 0, 0], torch.tensor([1 / (1 + math.e), math.e / (1 + math.e)], dtype=torch.float64), **CLOSE
    )
    assert lse.item() == pytest.approx(math.log(1 + math.e), rel=1e-12)


def test_one_token_is_returned_whole_and_its_score_is_the_lse():
    case = decode_case([1], heads=2)
    out, lse = reference_decode(case.q, case.contiguous, None, case.cache_seqlens, case.head_dim_v, 0.3)
    torch.testing.assert_close(out[0, 0, 0], case.tokens[0][0, : case.head_dim_v].double(), **CLOSE)
    torch.testing.assert_close(lse[0, :, 0], 0.3 * (case.q[0, 0].double() @ case.tokens[0][0].double()), **CLOSE)


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 3])
def test_agrees_with_torch_attention(layout, causal, queries):
    case = decode_case([37, 16, 5], queries=queries)
    out, lse = reference_decode(
        case.q, *case.cache(layout), case.cache_seqlens, case.head_dim_v, case.softmax_scale, causal
    )
    for b, tokens in enumerate(case.tokens):
        count = len(tokens)
        visible = torch.ones(queries, count, dtype=torch.bool)
        if causal:
            visible = visible.tril(count - queries)
        expected = torch_attention(case.q[b], tokens, case.head_dim_v, case.softmax_scale, visible)
        torch.testing.assert_close(out[b], expected, **CLOSE)
        scores = case.softmax_scale * torch.einsum("shd,td->hst", case.q[b].double(), tokens.double())
        expected_lse = scores.masked_fill(~visible, -torch.inf).exp().sum(-1).log()
        torch.testing.assert_close(lse[b], expected_lse, **CLOSE)


def test_a_window_counts_the_query_itself():
    case = decode_case([9], queries=2)
    out, _ = reference_decode(
        case.q, case.contiguous, None, case.cache_seqlens, case.head_dim_v, case.softmax_scale, window=3
    )
    visible = torch.zeros(2, 9, dtype=torch.bool)
    visible[0, 5:8] = True
    visible[1, 6:9] = True
    expected = torch_attention(case.q[0], case.tokens[0], case.head_dim_v, case.softmax_scale, visible)
    torch.testing.assert_close(out[0], expected, **CLOSE)


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_what_sees_nothing_gives_zero_and_minus_infinity(layout):
    """A sequence of no tokens, and the first two of three queries on one token."""
    case = decode_case([0, 1], queries=3)
    out, lse = reference_decode(case.q, *case.cache(layout), case.cache_seqlens, case.head_dim_v, case.softmax_scale)
    assert not out[0].any()
    assert not out[1, :2].any()
    assert (lse[0] == -torch.inf).all()
    assert (lse[1, :, :2] == -torch.inf).all()
    torch.testing.assert_close(out[1, 2, 0], case.tokens[1][0, : case.head_dim_v].double(), **CLOSE)


def test_a_separate_rope_cache_is_the_same_cache():
    case = decode_case([20, 7])
    rank = case.head_dim_v
    whole = reference_decode(case.q, case.paged, case.block_table, case.cache_seqlens, rank, case.softmax_scale)
    apart = reference_decode(
        case.q,
        case.paged[..., :rank],
        case.block_table,
        case.cache_seqlens,
        rank,
        case.softmax_scale,
        rope_cache=case.paged[..., rank:],
    )
    torch.testing.assert_close(apart[0], whole[0], **CLOSE)
    torch.testing.assert_close(apart[1], whole[1], **CLOSE)


def test_packed_rows_are_read_as_what_they_hold():
    case = decode_case([20, 7])
    rank = case.head_dim_v
    rows = quantize_latent(case.paged, rank)
    held = dequantize_latent(rows, rank, case.rope_dim, torch.float64)
    expected = reference_decode(case.q, held, case.block_table, case.cache_seqlens, rank, case.softmax_scale)
    packed = reference_decode(case.q, rows, case.block_table, case.cache_seqlens, rank, case.softmax_scale)
    torch.testing.assert_close(packed[0], expected[0], **CLOSE)
    torch.testing.assert_close(packed[1], expected[1], **CLOSE)
