import inspect
import math

import pytest
import torch

import mla_kernels.backends
from mla_kernels.backends import Backend
from mla_kernels.errors import InvalidInputError, UnsupportedShapeError
from mla_kernels.flash_mla import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata
from mla_kernels.fp8 import dequantize_latent, quantize_latent
from mla_kernels.reference import reference_decode
from tests.kernels.layouts import DecodeCase, decode_case

# float32 sums of a few hundred terms.
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


@pytest.fixture(params=["torch", "triton"])
def backend(request, monkeypatch):
    """The kernel is interpreted where there is no GPU; only the choice is forced."""
    monkeypatch.setattr(mla_kernels.backends, "choose_backend", lambda *_: Backend(request.param, "forced"))


def in_flash_mla_layout(case: DecodeCase) -> tuple[torch.Tensor, ...]:
    return case.q, case.paged[:, :, None], case.block_table, case.cache_seqlens


def expected_from_reference(case: DecodeCase, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = reference_decode(
        case.q, case.paged, case.block_table, case.cache_seqlens, case.head_dim_v, scale, causal
    )
    return out.float(), lse.float()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_the_classic_call(queries, causal):
    """Metadata from lengths and head counts, then everything by position."""
    case = decode_case([40, 17], queries=queries)
    metadata, num_splits = get_mla_metadata(case.cache_seqlens, queries * 3, 1)
    out, lse = flash_mla_with_kvcache(
        *in_flash_mla_layout(case), case.head_dim_v, metadata, num_splits, case.softmax_scale, causal
    )
    expected_out, expected_lse = expected_from_reference(case, case.softmax_scale, causal)
    torch.testing.assert_close(out, expected_out, **CLOSE)
    torch.testing.assert_close(lse, expected_lse, **CLOSE)
    assert lse.shape == (2, 3, queries)


def test_the_newer_call():
    """No arguments for the metadata, one object for all steps, the scale left to the default d^-½."""
    case = decode_case([40, 17], queries=2)
    metadata, num_splits = get_mla_metadata()
    assert isinstance(metadata, FlashMLASchedMeta)
    assert num_splits is None
    out, lse = flash_mla_with_kvcache(*in_flash_mla_layout(case), case.head_dim_v, metadata, num_splits, causal=True)
    expected_out, expected_lse = expected_from_reference(case, 1 / math.sqrt(48), causal=True)
    torch.testing.assert_close(out, expected_out, **CLOSE)
    torch.testing.assert_close(lse, expected_lse, **CLOSE)


def test_scheduler_tensors_of_flash_mla_itself_are_accepted():
    case = decode_case([40, 17])
    tensors = torch.zeros(78, 8, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    out, _ = flash_mla_with_kvcache(*in_flash_mla_layout(case), case.head_dim_v, *tensors)
    torch.testing.assert_close(out, expected_from_reference(case, 48**-0.5, False)[0], **CLOSE)


def test_the_arguments_have_flash_mlas_names_and_order():
    """Those of its flash_mla_interface.py, as of January 2026; get_mla_metadata's are those of the classic form."""
    decode = ", ".join(inspect.signature(flash_mla_with_kvcache).parameters)
    assert decode == (
        "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, "
        "causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, "
        "extra_topk_length"
    )
    metadata = ", ".join(inspect.signature(get_mla_metadata).parameters)
    assert metadata == "cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk"


@pytest.mark.usefixtures("backend")
def test_a_query_without_tokens_has_plus_infinity():
    case = decode_case([0, 1], queries=2)
    out, lse = flash_mla_with_kvcache(*in_flash_mla_layout(case), case.head_dim_v, *get_mla_metadata(), causal=True)
    assert not out[0].any()
    assert not out[1, 0].any()
    assert (lse[0] == torch.inf).all()
    assert (lse[1, :, 0] == torch.inf).all()
    assert lse[1, :, 1].isfinite().all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int8])
def test_fp8_rows_in_any_8_bit_dtype(dtype):
    case = decode_case([40, 17], rank=160, rope_dim=32)
    rows = quantize_latent(case.paged, 160)
    out, _ = flash_mla_with_kvcache(
        case.q,
        rows.view(dtype)[:, :, None],
        case.block_table,
        case.cache_seqlens,
        160,
        *get_mla_metadata(is_fp8_kvcache=True),
        is_fp8_kvcache=True,
    )
    held = dequantize_latent(rows, 160, 32)
    expected, _ = reference_decode(case.q, held, case.block_table, case.cache_seqlens, 160, 192**-0.5, causal=False)
    torch.testing.assert_close(out, expected.float(), **CLOSE)


@pytest.mark.parametrize(
    "name",
    ["indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"],
)
def test_sparse_attention_is_refused(name):
    case = decode_case([4])
    with pytest.raises(InvalidInputError, match=f"^{name} given"):
        flash_mla_with_kvcache(
            *in_flash_mla_layout(case), case.head_dim_v, *get_mla_metadata(), **{name: torch.zeros(1)}
        )


def test_sparse_metadata_and_several_key_heads_are_refused():
    with pytest.raises(InvalidInputError, match="topk is 64"):
        get_mla_metadata(topk=64)
    with pytest.raises(UnsupportedShapeError, match="2 key heads"):
        get_mla_metadata(num_heads_k=2)
    case = decode_case([4])
    with pytest.raises(UnsupportedShapeError, match="2 key heads"):
        flash_mla_with_kvcache(
            case.q,
            torch.zeros(2, 16, 2, 48),
            case.block_table,
            case.cache_seqlens,
            case.head_dim_v,
            *get_mla_metadata(),
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_table": None}, "block_table or cache_seqlens is None"),
        ({"cache_seqlens": None}, "block_table or cache_seqlens is None"),
        ({"softmax_scale": True}, "softmax_scale is True"),
        ({"k_cache": torch.zeros(4, 16, 48)}, r"\[pages, page, 1, d\]"),
        ({"k_cache": torch.zeros(4, 16, 1, 48, dtype=torch.bfloat16)}, "bfloat16 and q"),
        ({"k_cache": torch.zeros(4, 16, 1, 80, dtype=torch.uint8)}, "is_fp8_kvcache=True"),
        ({"is_fp8_kvcache": True}, "of 80 bytes"),
        ({"k_cache": torch.zeros(4, 16, 1, 64, dtype=torch.uint8), "is_fp8_kvcache": True}, "of 80 bytes"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    case = decode_case([4])
    arguments = {
        "q": case.q,
        "k_cache": case.paged[:, :, None],
        "block_table": case.block_table,
        "cache_seqlens": case.cache_seqlens,
        "head_dim_v": case.head_dim_v,
        "tile_scheduler_metadata": get_mla_metadata()[0],
    }
    with pytest.raises(InvalidInputError, match=words):
        flash_mla_with_kvcache(**(arguments | changes))
