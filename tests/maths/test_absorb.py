import pytest
import torch

from mla_convert.maths.absorb import AbsorbedMatrices, absorb_layer, merging_is_smaller, project_latents


def random_layer(heads: int, nope: int, value: int, rank: int, width: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, nope, rank), (heads, value, rank), (width, heads, value)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


# DeepSeek-V3: merging would take 128·512·7168 numbers for 128·512·128 + 7168·128·128 (4 times as many).
# One narrow latent: 2·3·8 = 48 merged against 2·3·6 + 8·2·6 = 132 apart.
@pytest.mark.parametrize(
    ("heads", "rank", "value", "width", "smaller"),
    [(128, 512, 128, 7168, False), (9, 128, 64, 576, False), (9, 48, 64, 576, True), (2, 3, 6, 8, True)],
)
def test_auto_merges_only_where_that_is_fewer_numbers(heads, rank, value, width, smaller):
    assert (heads * rank * width < heads * rank * value + width * heads * value) is smaller
    assert merging_is_smaller(heads, rank, value, width) is smaller


@pytest.mark.parametrize(("rank", "merged"), [(3, True), (64, False)])
def test_auto_decides_by_the_layers_own_shapes(rank, merged):
    matrices = absorb_layer(*random_layer(2, 5, 6, rank, 8), merge="auto")
    assert matrices.merged is merged
    counted = sum(t.numel() for t in (matrices.w_uv_t, matrices.w_comb) if t is not None)
    kept_w_o = 0 if merged else 8 * 2 * 6
    assert counted + kept_w_o == min(2 * rank * 8, 2 * rank * 6 + 8 * 2 * 6)


def test_matrices_are_in_decode_layout_and_share_nothing_with_the_weights():
    w_uk, w_uv, w_o = random_layer(2, 5, 6, 7, 8)
    separate = absorb_layer(w_uk, w_uv, w_o, merge="never")
    merged = absorb_layer(w_uk, w_uv, w_o, merge="always")
    assert separate.w_uv_t is not None
    assert merged.w_comb is not None
    assert (separate.w_uk.shape, separate.w_uv_t.shape, merged.w_comb.shape) == ((2, 5, 7), (2, 7, 6), (2, 7, 8))
    for tensor in (separate.w_uk, separate.w_uv_t, merged.w_comb):
        assert tensor.is_contiguous()
    before = separate.w_uk.clone()
    w_uk.zero_()
    assert torch.equal(separate.w_uk, before)


def test_the_product_is_rounded_once():
    w_uk, w_uv, w_o = random_layer(2, 5, 6, 7, 8, dtype=torch.bfloat16)
    merged = absorb_layer(w_uk, w_uv, w_o, merge="always")
    assert merged.w_comb is not None
    for head in range(2):
        exact = (w_o[:, head].double() @ w_uv[head].double()).T
        assert torch.equal(merged.w_comb[head], exact.to(torch.bfloat16))


def test_matrices_hold_exactly_one_output_side():
    w_uk, w_uv, _ = random_layer(2, 5, 6, 7, 8)
    with pytest.raises(ValueError, match="exactly one"):
        AbsorbedMatrices(w_uk)
    with pytest.raises(ValueError, match="exactly one"):
        AbsorbedMatrices(w_uk, w_uv_t=w_uv, w_comb=w_uv)


def test_matrices_that_are_not_merged_need_w_o():
    w_uk, w_uv, w_o = random_layer(2, 5, 6, 7, 8)
    matrices = absorb_layer(w_uk, w_uv, w_o, merge="never")
    latents = torch.ones(1, 1, 2, 7, dtype=torch.float64)
    with pytest.raises(ValueError, match="need w_o"):
        project_latents(latents, matrices)
