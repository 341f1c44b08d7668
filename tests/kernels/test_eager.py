import pytest
import torch

import mla_kernels.eager
from mla_kernels.eager import eager_decode
from mla_kernels.fp8 import quantize_latent
from mla_kernels.reference import reference_decode
from tests.kernels.layouts import decode_case

# float32 sums of a few hundred terms, and the result rounded once to the query's dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def assert_agrees(result, expected, dtype=torch.float32):
    out, lse = result
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    # Products of 16-bit numbers are exact in float32, so the LSE is as good in every dtype.
    torch.testing.assert_close(lse.double(), expected[1], rtol=2e-6, atol=2e-6)


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request, monkeypatch):
    """With many, chunks of 8 tokens and nothing fused: every running maximum and every page boundary is met."""
    if request.param == "many chunks":
        monkeypatch.setattr(mla_kernels.eager, "can_fuse", lambda *_: False)
        monkeypatch.setattr(mla_kernels.eager, "_CHUNK_BYTES", 1)
        monkeypatch.setattr(mla_kernels.eager, "_CHUNK_STEP", 8)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("lengths", [[50], [50, 50, 50], [50, 0, 1, 33, 16]])
@pytest.mark.parametrize(("queries", "causal"), [(1, True), (4, True), (4, False)])
def test_agrees_with_the_reference(layout, lengths, queries, causal):
    case = decode_case(lengths, queries=queries)
    arguments = (case.q, *case.cache(layout), case.cache_seqlens, case.head_dim_v, case.softmax_scale, causal)
    assert_agrees(eager_decode(*arguments), reference_decode(*arguments))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("window", [1, 7, 30, 1000])
@pytest.mark.parametrize("causal", [True, False])
def test_windows(layout, queries, window, causal):
    case = decode_case([50, 2, 0, 31], queries=queries)
    arguments = (case.q, *case.cache(layout), case.cache_seqlens, case.head_dim_v, case.softmax_scale, causal)
    assert_agrees(eager_decode(*arguments, window=window), reference_decode(*arguments, window=window))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_a_separate_rope_cache(layout):
    case = decode_case([50, 21], queries=2)
    cache, table = case.cache(layout)
    rank = case.head_dim_v
    arguments = (case.q, cache[..., :rank].contiguous(), table, case.cache_seqlens, rank, case.softmax_scale)
    rope = cache[..., rank:]
    assert_agrees(eager_decode(*arguments, rope_cache=rope), reference_decode(*arguments, rope_cache=rope))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows(layout, dtype):
    case = decode_case([50, 21], rank=160, rope_dim=32, queries=2)
    cache, table = case.cache(layout)
    arguments = (
        case.q.to(dtype),
        quantize_latent(cache, 160),
        table,
        case.cache_seqlens,
        case.head_dim_v,
        case.softmax_scale,
    )
    assert_agrees(eager_decode(*arguments), reference_decode(*arguments), dtype)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_caches_are_summed_in_float32(dtype):
    case = decode_case([50, 21], dtype=dtype, heads=9, queries=2)
    arguments = (case.q, case.paged, case.block_table, case.cache_seqlens, case.head_dim_v, case.softmax_scale)
    assert_agrees(eager_decode(*arguments), reference_decode(*arguments), dtype)


@pytest.mark.usefixtures("chunks")
def test_autocast_changes_nothing():
    case = decode_case([50, 21], queries=2)
    rank = case.head_dim_v
    latent, rope = case.paged.split([rank, case.rope_dim], dim=-1)
    arguments = (case.q, latent, case.block_table, case.cache_seqlens, rank, case.softmax_scale)
    with torch.autocast("cpu", torch.bfloat16):
        assert_agrees(eager_decode(*arguments, rope_cache=rope), reference_decode(*arguments, rope_cache=rope))


@pytest.mark.parametrize("heads", [1, 3, 32])
@pytest.mark.parametrize(("rank", "rope_dim"), [(16, 8), (96, 32), (448, 64), (512, 64)])
def test_head_counts_and_ranks(heads, rank, rope_dim):
    case = decode_case([70, 12], heads=heads, rank=rank, rope_dim=rope_dim)
    arguments = (case.q, case.paged, case.block_table, case.cache_seqlens, rank, 0.05)
    assert_agrees(eager_decode(*arguments), reference_decode(*arguments))


def test_a_whole_prompt_at_once():
    """Every query of a prompt, as a prefill asks, and chunks of the real size."""
    case = decode_case([700, 64], queries=64, heads=2, rank=512, rope_dim=64)
    arguments = (case.q, case.contiguous, None, case.cache_seqlens, 512, 0.05)
    assert_agrees(eager_decode(*arguments), reference_decode(*arguments))


@pytest.mark.usefixtures("chunks")
def test_more_queries_than_tokens():
    """The first queries see nothing and give 0 and −inf."""
    case = decode_case([2, 9], queries=4)
    arguments = (case.q, case.paged, case.block_table, case.cache_seqlens, case.head_dim_v, case.softmax_scale)
    out, lse = eager_decode(*arguments)
    assert not out[0, :2].any()
    assert (lse[0, :, :2] == -torch.inf).all()
    assert_agrees((out, lse), reference_decode(*arguments))


@pytest.mark.usefixtures("chunks")
def test_scores_far_from_zero_neither_overflow_nor_vanish():
    case = decode_case([50, 50])
    for scale in (40.0, -40.0):
        arguments = (case.q, case.paged, case.block_table, case.cache_seqlens, case.head_dim_v, scale)
        out, lse = eager_decode(*arguments)
        expected_out, expected_lse = reference_decode(*arguments)
        # Scores of some hundreds carry errors of 10^-4 in float32, and the weights the same relative error.
        torch.testing.assert_close(out.double(), expected_out, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=0)


def test_any_strides():
    case = decode_case([50, 21], queries=2)
    arguments = (case.cache_seqlens, case.head_dim_v, case.softmax_scale)
    expected = reference_decode(case.q, case.contiguous, None, *arguments)
    q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((2, *case.contiguous.shape[1:-1], 80), torch.nan)
    wide[..., 8 : 8 + case.contiguous.shape[-1]] = case.contiguous
    cache = wide[..., 8 : 8 + case.contiguous.shape[-1]]
    tokens_first = case.contiguous.transpose(0, 1).contiguous().transpose(0, 1)
    for strided in (cache, tokens_first):
        assert_agrees(eager_decode(q, strided, None, *arguments), expected)


def test_an_empty_batch():
    out, lse = eager_decode(
        torch.zeros(0, 1, 3, 48), torch.zeros(0, 5, 48), None, torch.zeros(0, dtype=torch.int32), 32, 1.0
    )
    assert out.shape == (0, 1, 3, 32)
    assert lse.shape == (0, 3, 1)


@pytest.mark.usefixtures("chunks")
def test_nothing_given_is_written_to():
    case = decode_case([50, 21], queries=3)
    rope = case.paged[..., case.head_dim_v :].clone()
    latent = case.paged[..., : case.head_dim_v].clone()
    given = (case.q, latent, case.block_table, case.cache_seqlens, rope)
    before = [tensor.clone() for tensor in given]
    eager_decode(
        case.q, latent, case.block_table, case.cache_seqlens, case.head_dim_v, case.softmax_scale, rope_cache=rope
    )
    for tensor, kept in zip(given, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), kept.nan_to_num())


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("split", [False, True])
def test_gradients_are_the_references(split):
    case = decode_case([20, 20], queries=3)
    rank = case.head_dim_v
    gradients = []
    for decode in (eager_decode, reference_decode):
        q = case.q.clone().requires_grad_()
        latent, rope = (part.clone().requires_grad_() for part in case.contiguous[:, :20].split([rank, 16], dim=-1))
        cache = (latent, rope) if split else (torch.cat((latent, rope), -1), None)
        out, lse = decode(
            q, cache[0], None, case.cache_seqlens, rank, case.softmax_scale, causal=True, rope_cache=cache[1]
        )
        (out.double().square().sum() + lse.double().sum()).backward()
        gradients.append((q.grad, latent.grad, rope.grad))
    for mine, expected in zip(*gradients, strict=True):
        # Two float32 roundings on the way back of gradients of order 1 to 10.
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_it_allocates_a_small_part_of_what_expanding_would():
    """The largest tensor made is a chunk of scores or the output: no copy of the cache, none repeated over heads."""
    heads, rank, length = 32, 512, 4096
    q = torch.zeros(1, 1, heads, rank + 64)
    kv = torch.zeros(1, length, rank + 64)
    seqlens = torch.tensor([length], dtype=torch.int32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        eager_decode(q, kv, None, seqlens, rank, 0.05)
    largest = max(event.self_cpu_memory_usage / max(event.count, 1) for event in profile.key_averages())
    assert largest <= 2 * q.nbytes + heads * length
    assert largest < kv.nbytes / 40
