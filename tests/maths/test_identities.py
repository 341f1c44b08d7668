"""The identities behind MLA, in float64, at sizes where every dimension differs from every other."""

import math

import pytest
import torch

from mla_convert.maths.absorb import absorb_layer, project_latents
from mla_convert.maths.attention import absorbed_attention, latent_attention, naive_attention
from mla_convert.maths.footprint import element_bytes, mha_elements, mla_elements, relative_change

BATCH, WIDTH, HEADS = 2, 40, 5
NOPE, ROPE, VALUE, RANK = 12, 6, 10, 16
SCALE = (NOPE + ROPE) ** -0.5


class Layer:
    """A random MLA layer and its cached quantities, with RoPE from its definition: e^{i position frequency}."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])

        self.w_dkv, self.w_kr = weight(RANK, WIDTH), weight(ROPE, WIDTH)
        self.w_uk, self.w_uv = weight(HEADS, NOPE, RANK), weight(HEADS, VALUE, RANK)
        self.w_uq, self.w_qr = weight(HEADS, NOPE, WIDTH), weight(HEADS, ROPE, WIDTH)
        self.w_o = weight(WIDTH, HEADS, VALUE)
        self.x = torch.randn(BATCH, 12, WIDTH, generator=generator, dtype=torch.float64)

    def queries(self, first: int, last: int):
        x = self.x[:, first:last]
        q_nope = torch.einsum("hnd,bsd->bhsn", self.w_uq, x)
        q_rope = rope(torch.einsum("hrd,bsd->bhsr", self.w_qr, x), torch.arange(first, last))
        return q_nope, q_rope

    def cached(self, first: int, last: int):
        x = self.x[:, first:last]
        return x @ self.w_dkv.T, rope(x @ self.w_kr.T, torch.arange(first, last))


def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn pair l, as the complex number x_l + i x_{l+R/2}, by positions · 10000^(-2l/R)."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([10000.0 ** (-l / half) for l in range(half)], dtype=torch.float64)  # noqa: E741
    turns = torch.polar(torch.ones(1, 1, dtype=torch.float64), positions[:, None].double() * frequencies)
    turned = torch.complex(x[..., :half], x[..., half:]) * turns
    return torch.cat([turned.real, turned.imag], dim=-1)


def max_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@pytest.fixture
def layer() -> Layer:
    return Layer()


def test_footprint_of_deepseek_v3_is_576_numbers_where_mha_has_32768():
    assert element_bytes(mha_elements(128, 128), 2) == 65_536
    assert element_bytes(mla_elements(512, 64), 2) == 1_152
    assert round(100 * relative_change(576, 32_768), 2) == -98.24


def test_rebuilt_keys_of_all_heads_have_at_most_the_latents_rank(layer):
    c_kv, _ = layer.cached(0, 12)
    other = torch.randn(60, RANK, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    latents = torch.cat([c_kv.flatten(0, 1), other])
    keys = torch.einsum("hnc,tc->thn", layer.w_uk, latents).flatten(1)
    assert min(keys.shape) > RANK
    assert torch.linalg.matrix_rank(keys) == RANK


def test_content_score_plus_rope_score_is_the_concatenated_dot_product(layer):
    # Unit-scale scores; both sides add the same N + R products in another order: a few float64 roundings apart.
    q_nope, q_rope = layer.queries(0, 12)
    c_kv, k_rope = layer.cached(0, 12)
    k_nope = torch.einsum("hnc,btc->bhtn", layer.w_uk, c_kv)
    content = torch.einsum("bhsn,bhtn->bhst", q_nope, k_nope)
    rotated = torch.einsum("bhsr,btr->bhst", q_rope, k_rope)
    query = torch.cat([q_nope, q_rope], dim=-1)
    key = torch.cat([k_nope, k_rope[:, None].expand(-1, HEADS, -1, -1)], dim=-1)
    joint = torch.einsum("bhsk,bhtk->bhst", query, key)
    assert max_difference(SCALE * (content + rotated), SCALE * joint) <= 1e-14


def test_rope_scores_depend_on_the_distance_only(layer):
    q = torch.einsum("hrd,bsd->bhsr", layer.w_qr, layer.x)[:, :, :1]
    k = (layer.x @ layer.w_kr.T)[:, :1]
    scores = [
        torch.einsum("bhsr,btr->bhst", rope(q, torch.tensor([at])), rope(k, torch.tensor([at - 7]))) for at in (7, 500)
    ]
    # At position 500 the angle itself is rounded to 500 · 2^-53.
    assert max_difference(*scores) <= 1e-12


@pytest.mark.parametrize("queries", [12, 4, 1])
def test_absorbed_equals_naive_in_logits_weights_and_outputs(layer, queries):
    arguments = (*layer.queries(12 - queries, 12), *layer.cached(0, 12), layer.w_uk, layer.w_uv, SCALE)
    naive, absorbed = naive_attention(*arguments), absorbed_attention(*arguments)
    assert max_difference(absorbed.logits, naive.logits) <= 1e-12
    assert max_difference(absorbed.weights, naive.weights) <= 1e-12
    assert max_difference(absorbed.outputs, naive.outputs) <= 1e-12


def test_naive_attention_equals_torchs_own_on_expanded_heads(layer):
    q_nope, q_rope = layer.queries(0, 12)
    c_kv, k_rope = layer.cached(0, 12)
    naive = naive_attention(q_nope, q_rope, c_kv, k_rope, layer.w_uk, layer.w_uv, SCALE)
    k_nope = torch.einsum("hnc,btc->bhtn", layer.w_uk, c_kv)
    key = torch.cat([k_nope, k_rope[:, None].expand(-1, HEADS, -1, -1)], dim=-1)
    value = torch.einsum("hvc,btc->bhtv", layer.w_uv, c_kv)
    expected = torch.nn.functional.scaled_dot_product_attention(
        torch.cat([q_nope, q_rope], dim=-1), key, value, is_causal=True, scale=SCALE
    )
    assert max_difference(naive.outputs, expected.transpose(1, 2)) <= 1e-12


def test_no_query_sees_a_later_token(layer):
    # The queries are the last 4 of 12 tokens: the first of them sees 9.
    trace = naive_attention(*layer.queries(8, 12), *layer.cached(0, 12), layer.w_uk, layer.w_uv, SCALE)
    seen = (trace.weights > 0).sum(dim=-1)
    assert (seen == torch.tensor([9, 10, 11, 12])).all()
    assert max_difference(trace.weights.sum(dim=-1), torch.ones(BATCH, HEADS, 4, dtype=torch.float64)) <= 1e-14


def test_prefill_of_8_and_4_decode_steps_equal_the_full_forward(layer):
    full = naive_attention(*layer.queries(0, 12), *layer.cached(0, 12), layer.w_uk, layer.w_uv, SCALE)

    cache = torch.cat(layer.cached(0, 8), dim=-1)
    steps = [naive_attention(*layer.queries(0, 8), *split(cache), layer.w_uk, layer.w_uv, SCALE).outputs]
    for position in range(8, 12):
        before = cache.numel() // BATCH
        cache = torch.cat([cache, torch.cat(layer.cached(position, position + 1), dim=-1)], dim=1)
        assert cache.numel() // BATCH - before == RANK + ROPE
        query = layer.queries(position, position + 1)
        steps.append(absorbed_attention(*query, *split(cache), layer.w_uk, layer.w_uv, SCALE).outputs)

    assert max_difference(torch.cat(steps, dim=1), full.outputs) <= 1e-12


@pytest.mark.parametrize("merge", ["always", "never"])
def test_absorption_changes_nothing_in_the_layers_output(layer, merge):
    arguments = (*layer.queries(0, 12), *layer.cached(0, 12))
    heads = naive_attention(*arguments, layer.w_uk, layer.w_uv, SCALE).outputs
    expected = torch.einsum("bshv,dhv->bsd", heads, layer.w_o)

    matrices = absorb_layer(layer.w_uk, layer.w_uv, layer.w_o, merge=merge)
    latents = latent_attention(*arguments, matrices.w_uk, SCALE)
    assert max_difference(project_latents(latents, matrices, layer.w_o), expected) <= 1e-12


def split(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cache[..., :RANK], cache[..., RANK:]
