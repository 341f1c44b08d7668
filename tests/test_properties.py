"""Properties that hold for any attention, drawn at random: sizes, biases, scalings, RoPE, norms, scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicCache

from mla_convert.mla import MLAConfig, MLAWeights
from mla_convert.mla.attention_mla import MLAAttention
from mla_convert.mla.names import from_hf, to_hf
from mla_convert.recipe import load_recipe
from mla_convert.spec import MLAShape
from mla_convert.transform import convert_layer
from tests.layer_case import EPS, Case, case, mla_answers, relative, source_answers

# Moments with condition numbers up to 1e8 leave half of float64's digits.
EXACT = 1e-7
# The module's softmax and norms are in float32, whatever the rest is in.
ROUNDING = 5e-6

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Drawn:
    """A random layer, its scores' changes, and sizes below full rank."""

    case: Case
    softcap: float | None
    slopes: bool
    kv_rank: int
    rope_dim: int

    @property
    def key_scales(self) -> int:
        w = self.case.weights
        if w.key_norm is None:
            return 0
        return w.w_k.shape[0] if w.norm_scope == "head" else 1

    def shape(self, rank: int, rope: int) -> MLAShape:
        dim = self.case.sizes[2]
        return MLAShape(rank, rope, dim, dim, self.key_scales)

    @property
    def full(self) -> MLAShape:
        _, groups, dim, width = self.case.sizes
        rope = groups * self.case.rope.dim
        width += int(self.case.weights.b_k is not None)
        return self.shape(min(min(groups * dim - rope, width) + groups * dim, width), rope)


@st.composite
def layers(draw: st.DrawFn) -> Drawn:
    groups, share, pairs = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    dim = 2 * pairs
    width = draw(st.integers(3, 40))
    c = case(
        heads=groups * share,
        groups=groups,
        dim=dim,
        width=width,
        biased=draw(st.booleans()),
        scaling=draw(st.sampled_from([1.0, 1.3, 0.7])),
        turning=draw(st.integers(0, pairs)),
        norms=draw(st.sampled_from([None, "head", "all"])),
        seed=100 * draw(st.integers(0, 50)),
    )
    rope = 2 * draw(st.integers(0, groups * c.rope.dim // 2))
    biased = int(c.weights.b_k is not None)
    most = min(min(groups * dim - rope, width + biased) + groups * dim, width + biased)
    return Drawn(
        c,
        softcap=draw(st.sampled_from([None, 2.0])),
        slopes=draw(st.booleans()),
        kv_rank=draw(st.integers(1, most)),
        rope_dim=rope,
    )


@SETTINGS
@given(layers(), st.sampled_from(["exact", "default", "forward", "mha2mla"]))
def test_full_rank_is_exact(drawn: Drawn, name: str) -> None:
    recipe = load_recipe(name)
    if recipe.decouple.slots == "one_per_pair" and drawn.full.rope_dim > drawn.case.rope.dim:
        return  # this recipe cannot give every head's pair a slot
    c = drawn.case
    found = convert_layer(c.weights, c.statistics, c.rope, drawn.full, recipe).weights
    x = c.x[:25]
    for mine, theirs in zip(mla_answers(found, c.rope, x), source_answers(c, x), strict=True):
        assert relative(mine, theirs) <= EXACT


@SETTINGS
@given(layers())
def test_the_module_absorbed_and_expanded_answers_as_the_definition_and_caches_what_was_promised(drawn: Drawn) -> None:
    c = drawn.case
    shape = drawn.shape(drawn.kv_rank, drawn.rope_dim)
    weights = convert_layer(c.weights, c.statistics, c.rope, shape, load_recipe("default")).weights
    assert weights.shape == shape
    assert shape.cached == drawn.kv_rank + drawn.rope_dim + drawn.key_scales
    expected = _by_definition(drawn, weights, c.x[:12])
    for mode in ("expanded", "absorbed"):
        attention = _module(drawn, weights)
        attention.attention_mode = mode
        whole = _run(attention, drawn, c.x[:12], None)
        assert relative(whole, expected) <= ROUNDING
        cache = DynamicCache()
        parts = [
            _run(attention, drawn, c.x[:7], cache),
            *(_run(attention, drawn, c.x[i : i + 1], cache, i) for i in range(7, 12)),
        ]
        assert relative(torch.cat(parts), expected) <= ROUNDING
        held = cache.layers[0]
        assert held.keys.shape[-1] + held.values.shape[-1] == shape.cached


@SETTINGS
@given(layers())
def test_names_take_a_layer_there_and_back(drawn: Drawn) -> None:
    c = drawn.case
    shape = drawn.shape(drawn.kv_rank, drawn.rope_dim)
    weights = convert_layer(c.weights, c.statistics, c.rope, shape, load_recipe("default")).weights
    norms = 0 if weights.w_qa is None else len(weights.w_qa)
    again = from_hf(to_hf(weights), shape, len(weights.w_uq), weights.inv_freq, query_norms=norms, pairs=weights.pairs)
    for name, value in vars(weights).items():
        if isinstance(value, Tensor):
            assert torch.equal(getattr(again, name), value), name
        else:
            assert getattr(again, name) == value, name


SCALE = 0.4


def _module(drawn: Drawn, weights: MLAWeights) -> MLAAttention:
    heads, groups, dim, width = drawn.case.sizes
    tensors, normed = to_hf(weights), weights.w_qa is not None
    config: Any = MLAConfig(
        num_hidden_layers=1,
        hidden_size=width,
        num_attention_heads=heads,
        kv_lora_rank=weights.shape.kv_rank,
        qk_rope_head_dim=weights.shape.rope_dim,
        qk_nope_head_dim=dim,
        v_head_dim=dim,
        rope_inv_freq=[list(weights.inv_freq)],
        attention_scale=SCALE,
        attention_softcap=drawn.softcap,
        qk_norm=drawn.case.weights.norm_scope if normed else None,
        qk_norm_eps=EPS,
        qk_norm_dim=dim if normed else 0,
        qk_norm_key_heads=groups if normed else 0,
        query_bias="q_proj.bias" in tensors or "q_a_proj.bias" in tensors,
        key_norm_bias="k_norm_proj.bias" in tensors,
        latent_bias="kv_a_proj_with_mqa.bias" in tensors,
        output_bias="o_proj.bias" in tensors,
    )
    config._attn_implementation = "sdpa"
    attention = MLAAttention(config, 0).double()
    attention.load_state_dict(tensors)
    return attention.eval()


@torch.no_grad()
def _run(attention: MLAAttention, drawn: Drawn, x: Tensor, cache: Any, start: int = 0) -> Tensor:
    inv_freq = torch.tensor(attention.config.rope_inv_freq[0], dtype=torch.float64)
    angles = torch.arange(start, start + len(x), dtype=torch.float64)[:, None] * inv_freq
    scaling = drawn.case.rope.attention_scaling
    turns = (angles.cos() * scaling)[None], (angles.sin() * scaling)[None]
    bias = None
    if drawn.slopes:
        bias = (_slopes(attention.num_heads)[:, None] * torch.arange(start + len(x)))[None, :, None]
    return attention(x[None], turns, None, cache=cache, score_bias=bias)[0][0]


def _slopes(heads: int) -> Tensor:
    return 0.3 ** torch.arange(1, heads + 1, dtype=torch.float64)


def _by_definition(drawn: Drawn, weights: MLAWeights, x: Tensor) -> Tensor:
    """The layer's output [n D] from its scores and values, causally."""
    scores, values = mla_answers(weights, drawn.case.rope, x)
    scores = scores * SCALE
    if drawn.softcap is not None:
        scores = drawn.softcap * torch.tanh(scores / drawn.softcap)
    if drawn.slopes:
        distance = torch.arange(len(x))[None] - torch.arange(len(x))[:, None]  # s - t, of key s and query t
        scores = scores + _slopes(len(scores))[:, None, None] * distance
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(future, -torch.inf).softmax(-1)
    out = torch.einsum("hts,shv,dhv->td", probabilities, values, weights.w_o)
    return out if weights.b_o is None else out + weights.b_o


def test_the_slots_and_the_latent_of_a_layer_are_not_empty_by_accident() -> None:
    """The strategies draw layers with and without slots, norms and biases, or the properties would hold of little."""
    seen: set[tuple[bool, bool, bool]] = set()

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(layers())
    def collect(drawn: Drawn) -> None:
        w = drawn.case.weights
        seen.add((drawn.rope_dim > 0, w.key_norm is not None, w.b_k is not None))

    collect()
    assert len(seen) == 8
