from itertools import pairwise

import pytest
import torch

from mla_kernels.errors import InvalidInputError
from mla_kernels.merge import merge_states
from mla_kernels.reference import reference_decode
from tests.kernels.layouts import decode_case

# float64 sums of a few hundred terms in two orders.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def part(case, start, stop):
    """The attention of the case's only sequence over its tokens [start, stop)."""
    length = torch.tensor([stop - start], dtype=torch.int32)
    tokens = case.contiguous[:, start:stop]
    return reference_decode(case.q, tokens, None, length, case.head_dim_v, case.softmax_scale, causal=False)


@pytest.mark.parametrize("cuts", [[0, 40], [0, 13, 40], [0, 1, 1, 30, 40]])
def test_joined_parts_are_the_whole(cuts):
    """The third has an empty part."""
    case = decode_case([40], queries=2)
    parts = [part(case, start, stop) for start, stop in pairwise(cuts)]
    out, lse = merge_states([p[0] for p in parts], [p[1] for p in parts])
    whole_out, whole_lse = part(case, 0, 40)
    torch.testing.assert_close(out, whole_out, **CLOSE)
    torch.testing.assert_close(lse, whole_lse, **CLOSE)


def test_far_apart_log_sum_exps_neither_overflow_nor_vanish():
    out = [torch.full((1, 1, 1, 2), 3.0), torch.full((1, 1, 1, 2), 5.0)]
    merged, lse = merge_states(out, [torch.full((1, 1, 1), 1000.0), torch.full((1, 1, 1), -1000.0)])
    assert merged.flatten().tolist() == [3.0, 3.0]
    assert lse.item() == 1000.0
    merged, lse = merge_states(out, [torch.full((1, 1, 1), -1e4)] * 2)
    assert merged.flatten().tolist() == [4.0, 4.0]
    # log 2 beside 10⁴ in float32, whose steps there are 10⁻³
    assert lse.item() == pytest.approx(-1e4 + 0.693, abs=1e-3)


def test_a_part_without_tokens_weighs_nothing_even_when_it_holds_nan():
    case = decode_case([8])
    out, lse = part(case, 0, 8)
    merged, merged_lse = merge_states([torch.full_like(out, torch.nan), out], [torch.full_like(lse, -torch.inf), lse])
    torch.testing.assert_close(merged, out, **CLOSE)
    torch.testing.assert_close(merged_lse, lse, **CLOSE)


def test_no_tokens_in_any_part_give_zero_and_minus_infinity():
    nan = torch.full((1, 2, 3, 4), torch.nan)
    out, lse = merge_states([nan, nan], [torch.full((1, 3, 2), -torch.inf)] * 2)
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_a_nan_that_counts_is_not_hidden():
    nan = torch.full((1, 1, 1, 2), torch.nan)
    out, _ = merge_states([nan, torch.zeros(1, 1, 1, 2)], [torch.zeros(1, 1, 1)] * 2)
    assert out.isnan().all()


def test_sums_are_in_float32_and_the_output_in_the_parts_dtype():
    parts = [torch.randn(1, 1, 2, 8, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(9)]
    out, lse = merge_states(parts, [torch.zeros(1, 2, 1)] * 9)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    # The exact mean, rounded once.
    assert torch.equal(out, torch.stack(parts).float().mean(0).bfloat16())
    assert merge_states([parts[0].double()], [torch.zeros(1, 2, 1, dtype=torch.float64)])[1].dtype == torch.float64


@pytest.mark.parametrize(
    ("outs", "lses", "words"),
    [
        ([], [], "0 outputs"),
        ([torch.zeros(1, 2, 3, 4)], [], "1 outputs and 0"),
        ([torch.zeros(2, 3, 4)], [torch.zeros(2, 3)], r"outs\[0\]"),
        ([torch.zeros(1, 2, 3, 4)], [torch.zeros(1, 2, 3)], "part 0"),
        ([torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)], [torch.zeros(1, 3, 2)] * 2, "part 1"),
        ([torch.zeros(1, 1, 1, 4, device="meta")], [torch.zeros(1, 1, 1)], "meta and cpu"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(outs, lses, words):
    with pytest.raises(InvalidInputError, match=words):
        merge_states(outs, lses)


def test_what_flash_mla_calls_empty_is_empty() -> None:
    """FlashMLA gives +inf to a query that saw nothing."""
    out = torch.randn(1, 1, 2, 8, generator=torch.Generator().manual_seed(0))
    lse = torch.tensor([[[0.5], [1.5]]])
    empty = torch.full_like(lse, torch.inf)
    merged, total = merge_states([out, torch.full_like(out, torch.nan)], [lse, empty])
    assert torch.equal(merged, out)
    assert torch.equal(total, lse)
    nothing, none = merge_states([out, out], [empty, empty])
    assert not nothing.any()
    assert (none == -torch.inf).all()
