"""The decode kernel against the float64 reference: interpreted on a CPU, compiled where there is a GPU."""

import pytest
import torch
import triton
import triton.language as tl

from mla_kernels import kernel, merge_states, mla_decode
from mla_kernels.combine import combine_kernel
from mla_kernels.kernel import decode_kernel
from tests.kernels.cases import DEVICE, Case, assert_matches, make_case

# Relative. float32 carries 24 bits through sums of some hundred terms. The others round the softmax weights and the
# result to 11 and 8 bits; the interpreter truncates to bfloat16 where the hardware rounds.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
LENGTHS = (0, 20, 140, 64)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the launcher allocates starts as NaN, so that what a kernel does not write, or must not read, shows."""
    empty = torch.empty

    def poisoned(*size, **options):
        tensor = empty(*size, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("rope_dim", [8, 16, 32, 64])
@pytest.mark.parametrize("rank", [96, 160, 192, 256, 320, 448, 512])
def test_every_rank_and_rope_size(rank: int, rope_dim: int) -> None:
    case = make_case(rank, rope_dim, 3, LENGTHS)
    assert_matches(case.run(), case.expected(), TOLERANCE[torch.float32])


@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("heads", [1, 3, 9, 63, 64, 126, 128])
def test_every_head_count_and_query_count(heads: int, queries: int) -> None:
    case = make_case(96, 16, heads, LENGTHS, queries=queries)
    assert_matches(case.run(num_splits=1), case.expected(), TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rank", "rope_dim"), [(160, 32), (256, 64), (512, 64)])
def test_sixteen_bit_dtypes(rank: int, rope_dim: int, dtype: torch.dtype) -> None:
    case = make_case(rank, rope_dim, 9, LENGTHS, dtype=dtype)
    assert_matches(case.run(), case.expected(), TOLERANCE[dtype])


@pytest.mark.parametrize("page", [16, 48, 64, 128, None])
def test_every_page_size_and_a_contiguous_cache(page: int | None) -> None:
    case = make_case(160, 32, 3, LENGTHS, queries=2, page=page)
    assert_matches(case.run(), case.expected(), TOLERANCE[torch.float32])


@pytest.mark.parametrize("rank", [16, 100, 240, 496, 1024])
def test_ranks_that_no_sum_of_tiles_meets(rank: int) -> None:
    case = make_case(rank, 32, 2, (20, 70))
    assert_matches(case.run(), case.expected(), TOLERANCE[torch.float32])


def test_positions_that_are_not_rotary() -> None:
    """A model without RoPE has no RoPE part at all."""
    case = make_case(96, 0, 4, LENGTHS)
    assert_matches(case.run(), case.expected(), TOLERANCE[torch.float32])


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 40])
def test_any_number_of_splits(num_splits: int) -> None:
    """Forty are more than there are tiles: most hold nothing, and nothing of them may be read."""
    case = make_case(96, 32, 5, (0, 20, 300, 64), queries=2)
    assert_matches(case.run(num_splits=num_splits), case.expected(), TOLERANCE[torch.float32])


@pytest.mark.parametrize("causal", [True, False])
def test_queries_that_see_the_future_or_not(causal: bool) -> None:
    case = make_case(96, 16, 3, (3, 50, 100), queries=4)
    assert_matches(case.run(causal=causal), case.expected(causal=causal), TOLERANCE[torch.float32])


def test_more_queries_than_cached_tokens() -> None:
    """The first queries see nothing: 0 and -inf, in one split or in several."""
    case = make_case(96, 16, 3, (2, 0, 70), queries=4)
    for splits in (1, 3):
        out, lse = case.run(num_splits=splits)
        assert_matches((out, lse), case.expected(), TOLERANCE[torch.float32])
        assert (lse[0, :, :2] == -torch.inf).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 10, 64, 1000])
def test_a_sliding_window(window: int, causal: bool) -> None:
    case = make_case(96, 16, 3, (0, 20, 140), queries=2)
    options = {"causal": causal, "window": window}
    for splits in (1, 3):
        assert_matches(case.run(num_splits=splits, **options), case.expected(**options), TOLERANCE[torch.float32])


def test_nothing_before_the_window_is_read() -> None:
    case = make_case(96, 16, 3, (200,))
    want = case.expected(window=50)
    assert case.block_table is not None
    case.kv_cache[case.block_table[0, 0].long()] = float("nan")
    assert_matches(case.run(window=50, num_splits=2), want, TOLERANCE[torch.float32])


def test_the_rope_part_may_be_kept_apart() -> None:
    case = make_case(160, 32, 5, LENGTHS, page=None)
    latent, rope = case.kv_cache[..., :160].contiguous(), case.kv_cache[..., 160:].contiguous()
    got = mla_decode(case.q, latent, None, case.lengths, 160, case.scale, rope_cache=rope)
    assert_matches(got, case.expected(), TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rank", "rope_dim"), [(176, 32), (512, 64)])
def test_an_fp8_cache(rank: int, rope_dim: int, dtype: torch.dtype) -> None:
    """Against the reference on the same rows: quantisation is not the kernel's error."""
    case = make_case(rank, rope_dim, 5, LENGTHS, queries=2, dtype=dtype, fp8=True)
    assert_matches(case.run(), case.expected(), TOLERANCE[dtype])


def test_every_finite_fp8_code_is_decoded_exactly() -> None:
    """A single visible token is returned as it is: sixteen channels of sixteen sequences return all codes."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    # The two NaN codes, which the quantiser never writes.
    codes[codes & 0x7F == 0x7F] = 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        case = make_case(16, 8, 1, (1,) * 16, dtype=dtype, fp8=True, page=None)
        case.kv_cache[:, 0, :16] = codes.to(DEVICE)
        case.kv_cache[:, 0, 16:20] = torch.tensor([1.0]).view(torch.uint8).to(DEVICE)
        out, _ = case.run(num_splits=1)
        assert torch.equal(out[:, 0, 0].cpu().float(), codes.view(torch.float8_e4m3fn).float())


@triton.jit
def decode_all_codes(CODES, OUT, DTYPE: tl.constexpr, PTX: tl.constexpr):
    row = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(OUT + row, kernel._decode_codes(tl.load(CODES + row), DTYPE, PTX))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_codes_are_decoded_in_the_format_of_the_query(dtype: torch.dtype) -> None:
    """The interpreter multiplies in float32 and so decodes to it: here the other formats decode too."""
    if dtype == torch.bfloat16 and DEVICE.type != "cuda":
        pytest.skip("the interpreter keeps bfloat16 as integers")
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(16, 16)
    codes[codes & 0x7F == 0x7F] = 0
    out = torch.empty(16, 16, dtype=dtype, device=DEVICE)
    decode_all_codes[(1,)](codes, out, getattr(tl, str(dtype).split(".")[1]), DEVICE.type == "cuda")
    factor = kernel.FLOAT16_FACTOR.value if dtype == torch.float16 else 1.0
    assert torch.equal(out.float() * factor, codes.view(torch.float8_e4m3fn).float())


def test_parts_of_a_cache_merge_into_the_whole() -> None:
    """The LSE's identity: attending to a prefix and to the rest, and joining them, is attending to everything."""
    whole = make_case(160, 32, 4, (150, 90), page=None)
    cut = torch.tensor([70, 64], dtype=torch.int32, device=DEVICE)
    prefix = Case(whole.q, whole.kv_cache, None, cut, 160, whole.scale).run(causal=False)
    outs, lses = [prefix[0]], [prefix[1]]
    rest = torch.full_like(whole.kv_cache, float("nan"))
    for b, start in enumerate(cut.tolist()):
        length = int(whole.lengths[b])
        rest[b, : length - start] = whole.kv_cache[b, start:length]
    out, lse = Case(whole.q, rest, None, whole.lengths - cut, 160, whole.scale).run(causal=False)
    merged = merge_states([*outs, out], [*lses, lse])
    assert_matches(merged, whole.expected(), TOLERANCE[torch.float32])


def test_the_output_may_be_given() -> None:
    case = make_case(96, 16, 3, (20, 0))
    for splits in (1, 2):
        out = torch.full((2, 1, 3, 96), float("nan"), device=DEVICE)
        got, lse = case.run(out=out, num_splits=splits)
        assert got is out
        assert_matches((out, lse), case.expected(), TOLERANCE[torch.float32])


def test_queries_and_caches_may_be_views() -> None:
    """Strides are free but for the last dim: a cache of several layers, queries laid out head by head."""
    case = make_case(96, 16, 3, (20, 70), queries=2)
    layers = torch.full((case.kv_cache.shape[0], 3, *case.kv_cache.shape[1:]), float("nan"), device=DEVICE)
    layers[:, 1] = case.kv_cache
    q = case.q.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    got = mla_decode(q, layers[:, 1], case.block_table, case.lengths, 96, case.scale)
    assert_matches(got, case.expected(), TOLERANCE[torch.float32])


# What other kernels' trackers report. Names say what went wrong there.


@pytest.mark.parametrize("num_splits", [1, 4])
def test_an_empty_sequence_does_not_spread_nan_over_the_batch(num_splits: int) -> None:
    """0/0 in rows without tokens (vLLM pull request 57094, FlashInfer issue 2883)."""
    case = make_case(96, 16, 3, (0, 33, 0, 80, 0))
    out, lse = case.run(num_splits=num_splits)
    assert not out[[0, 2, 4]].any()
    assert (lse[[0, 2, 4]] == -torch.inf).all()
    assert_matches((out, lse), case.expected(), TOLERANCE[torch.float32])


@pytest.mark.parametrize("fp8", [False, True])
def test_nan_in_the_unused_tail_of_a_page_does_not_leak(fp8: bool) -> None:
    """Zero weight times NaN is NaN (FlashInfer issue 941)."""
    case = make_case(96, 16, 3, (1, 17, 63, 65), fp8=fp8)
    assert_matches(case.run(), case.expected(), TOLERANCE[torch.float32])


@pytest.mark.parametrize("page", [16, 64])
def test_several_queries_do_not_read_past_the_block_table(page: int) -> None:
    """Positions counted from the first query run past the last page (vLLM issue 51848)."""
    case = make_case(96, 16, 3, (2 * page, 2 * page - 1), queries=4, page=page)
    assert case.block_table is not None
    wide = torch.full((2, 5), 0, dtype=torch.int32, device=DEVICE)
    unused = next(i for i in range(case.kv_cache.shape[0]) if not (case.block_table == i).any())
    # What lies behind the table's two columns in memory names a page of NaN.
    wide[:] = unused
    wide[:, :2] = case.block_table
    got = mla_decode(case.q, case.kv_cache, wide[:, :2], case.lengths, 96, case.scale, num_splits=3)
    assert_matches(got, case.expected(), TOLERANCE[torch.float32])


def test_splits_come_from_shapes_so_lengths_may_change_under_a_captured_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split count taken from the lengths of the capture is wrong at replay (vLLM pull request 51119)."""
    from mla_kernels import choice

    chosen: list[int] = []
    choose = choice.choose_splits

    def recorded(*shapes: int) -> int:
        chosen.append(choose(*shapes))
        return chosen[-1]

    monkeypatch.setattr(choice, "choose_splits", recorded)
    case = make_case(96, 16, 3, (1500, 300))
    # Pages that the first lengths use are all that the cache has.
    for lengths in ((1500, 300), (1, 0), (64, 65), (20, 299)):
        case.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        assert_matches(case.run(), case.expected(), TOLERANCE[torch.float32])
    assert len(set(chosen)) == 1
    assert chosen[0] > 1


def test_nothing_is_tuned_while_a_graph_is_captured() -> None:
    """Autotuning launches and times kernels (Triton issue 10596): the kernels have no configurations to choose from."""
    assert not hasattr(decode_kernel, "configs")
    assert not hasattr(combine_kernel, "configs")


def test_repeated_runs_agree_bit_for_bit() -> None:
    """A race over shared memory shows as different results at rank 256 (FlashMLA-ETAP issue 1)."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    case = make_case(256, 64, 9, (200, 130), dtype=dtype)
    first = case.run(num_splits=2)
    for _ in range(50 if DEVICE.type == "cuda" else 2):
        again = case.run(num_splits=2)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_captured_graph_replays_with_other_lengths() -> None:
    case = make_case(256, 64, 32, (500, 300), dtype=torch.bfloat16)
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.run()
    for lengths in ((500, 300), (1, 0), (64, 65)):
        case.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert_matches(got, case.expected(), TOLERANCE[torch.bfloat16])
