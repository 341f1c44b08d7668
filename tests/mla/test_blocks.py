"""What is around the attention: every kind of norm, block and placement is its definition, written out in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mla_convert.mla import MLAConfig
from mla_convert.mla.blocks_mla import MLADecoderLayer, MLAExperts, MLALayerNorm, MLARMSNorm, make_mlp
from tests.mla.native import SIZES, cache_of, native, tokens

# float32 (6e-8) through sums over some dozens of terms of order one.
TOLERANCE = 1e-5
WIDTH, INNER = SIZES["hidden_size"], SIZES["intermediate_size"]
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def config(**changes: Any) -> MLAConfig:
    return MLAConfig(**{**SIZES, **changes})


def randomised(module: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return module.eval()


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or (2, 7, WIDTH)), generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    return found.shape == expected.shape and (found.double() - expected.double()).abs().max().item() <= tolerance


def normed(x: Tensor, norm: Any) -> Tensor:
    """The definitions: RMSNorm divides by the root mean square, LayerNorm takes the mean out first."""
    x, weight = x.double(), norm.weight.double() + norm.offset
    if isinstance(norm, MLALayerNorm):
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * weight
    return x if getattr(norm, "bias", None) is None else x + norm.bias.double()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["rms", "layer", "layer-bias"])
@torch.no_grad()
def test_norms_are_their_definitions(kind: str, offset: float) -> None:
    norm = MLARMSNorm(WIDTH, 1e-3, offset) if kind == "rms" else MLALayerNorm(WIDTH, 1e-3, "bias" in kind, offset)
    norm, x = randomised(norm), 3 * inputs() + 0.5
    assert near(norm(x), normed(x, norm))
    # in narrow dtypes nothing but the answer is rounded: half a step of bfloat16, 2^-9, and one more for Llama's order
    narrow = norm.to(torch.bfloat16)
    found, expected = narrow(x.to(torch.bfloat16)), normed(x.to(torch.bfloat16), narrow)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - expected).abs() <= 2**-7 * expected.abs() + 1e-6).all()


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    out = x.double() @ module.weight.double().T
    return out if module.bias is None else out + module.bias.double()


def gated(x: Tensor, mlp: Any) -> Tensor:
    return linear(nn.functional.silu(linear(x, mlp.gate_proj)) * linear(x, mlp.up_proj), mlp.down_proj)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_feed_forward_blocks_are_their_definitions(bias: bool) -> None:
    x = inputs()
    mlp: Any = randomised(make_mlp(config(mlp_bias=bias), 0))
    assert near(mlp(x), gated(x, mlp))
    plain: Any = randomised(make_mlp(config(mlp="plain", hidden_act="gelu", mlp_bias=bias), 0))
    assert near(plain(x), linear(gelu(linear(x, plain.up_proj)), plain.down_proj))
    assert {name.split(".")[0] for name, _ in plain.named_parameters()} == {"up_proj", "down_proj"}
    assert any(name.endswith("bias") for name, _ in plain.named_parameters()) == bias


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("shared", [0, 20])
@torch.no_grad()
def test_experts_answer_by_their_probabilities(shared: int, normalised: bool) -> None:
    """Every expert is asked about every token here, and the answers of those that are not among the first two drop."""
    changes = {**EXPERTS, "norm_topk_prob": normalised, "shared_expert_intermediate_size": shared}
    block: Any = randomised(MLAExperts(config(**changes)))
    x = inputs()
    probabilities = linear(3 * x, block.gate).softmax(-1)
    block.gate.weight *= 3
    ranks = probabilities.argsort(-1, descending=True).argsort(-1)
    weights = probabilities * (ranks < 2)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    expected = sum(weights[..., i, None] * gated(x, expert) for i, expert in enumerate(block.experts))
    if shared:
        expected = expected + torch.sigmoid(linear(x, block.shared_expert_gate)) * gated(x, block.shared_expert)
    assert near(block(x), expected)


def test_gradients_reach_the_router_and_the_experts_that_answered() -> None:
    block: Any = randomised(MLAExperts(config(**EXPERTS)))
    x = inputs(1, 1, WIDTH)
    block(x).square().sum().backward()
    answered = block.gate(x).topk(2).indices.flatten().tolist()
    assert block.gate.weight.grad.abs().max() > 0
    for i, expert in enumerate(block.experts):
        assert (expert.down_proj.weight.grad is not None) == (i in answered)


@torch.no_grad()
def test_experts_are_in_the_layers_that_say_so() -> None:
    model = native(**EXPERTS, expert_layers=[False, True, False])
    kinds = [type(layer.mlp).__name__ for layer in model.model.layers]
    assert kinds == ["MLAMLP", "MLAExperts", "MLAMLP"]
    assert model(tokens(), use_cache=False).logits.isfinite().all()


class Attention(nn.Module):
    """Stands in for the attention: a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.map(hidden_states), None


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("inner", ["before", "after", "both"])
@pytest.mark.parametrize("order", ["sequential", "parallel", "parallel-shared"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@torch.no_grad()
def test_layers_place_norms_and_residuals(norm: str, order: str, inner: str, scale: float) -> None:
    shared = order == "parallel-shared"
    made: Any = MLADecoderLayer(
        config(
            norm=norm,
            norm_bias=norm == "layer",
            input_norms=inner != "after",
            output_norms=inner != "before",
            parallel_residual=order != "sequential",
            shared_input_norm=shared,
            residual_scale=scale,
        ),
        0,
    )
    made.self_attn = Attention()
    layer, x = randomised(made), inputs()
    there = {name.split(".")[0] for name, _ in layer.named_parameters()} - {"self_attn", "mlp"}
    before = {"input_layernorm"} if shared else {"input_layernorm", "post_attention_layernorm"}
    after = {"attention_output_layernorm", "mlp_output_layernorm"}
    assert there == {"before": before, "after": after, "both": before | after}[inner]

    def through(name: str, value: Tensor) -> Tensor:
        return normed(value, getattr(layer, name)) if name in there else value.double()

    attended = linear(through("input_layernorm", x), layer.self_attn.map)
    attended = scale * through("attention_output_layernorm", attended)
    assert near(layer.added(layer.attend(x)), attended)
    second = x if order != "sequential" else x + attended
    fed = gated(through("input_layernorm" if shared else "post_attention_layernorm", second), layer.mlp)
    assert near(layer(x), x + attended + scale * through("mlp_output_layernorm", fed))


@torch.no_grad()
def test_embeddings_are_scaled_once_and_in_the_weights_dtype() -> None:
    ids, scale = tokens(), 36**0.5 + 0.1234
    plain, scaled = native(), native(embedding_scale=scale)
    expected = plain(inputs_embeds=plain.model.embed_tokens(ids) * scale, use_cache=False).logits
    assert near(scaled(ids, use_cache=False).logits, expected)
    assert near(scaled(inputs_embeds=scaled.get_input_embeddings()(ids), use_cache=False).logits, expected)
    narrow = native(embedding_scale=scale).to(torch.bfloat16).model.embed_tokens
    rounded = narrow.weight[ids].double() * torch.tensor(scale).to(torch.bfloat16).double()
    assert torch.equal(narrow(ids), rounded.to(torch.bfloat16))


@torch.no_grad()
def test_learned_positions_and_an_embedding_norm_come_before_the_layers() -> None:
    ids = tokens()
    model = native(learned_positions=64, embedding_norm=True, norm="layer", norm_bias=True)
    states = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    at = torch.arange(ids.shape[1])
    table = model.model.embed_positions.weight
    assert near(states[0], normed(model.model.embed_tokens(ids) + table[at], model.model.embed_norm))
    moved = model(ids, position_ids=at[None] + 5, use_cache=False, output_hidden_states=True).hidden_states[0]
    assert near(moved, normed(model.model.embed_tokens(ids) + table[at + 5], model.model.embed_norm))
    outputs = model(ids[:, :7], use_cache=True)
    rest = model(ids[:, 7:], past_key_values=cache_of(outputs)).logits
    assert near(rest, model(ids, use_cache=False).logits[:, 7:])


@torch.no_grad()
def test_logits_are_scaled_and_then_capped() -> None:
    ids = tokens()
    plain = native()(ids, use_cache=False).logits.double()
    assert near(native(logits_scale=0.3)(ids, use_cache=False).logits, 0.3 * plain)
    capped = native(logits_scale=3.0, final_logit_softcap=2.0)(ids, use_cache=False).logits
    assert near(capped, 2.0 * torch.tanh(3.0 * plain / 2.0))


@torch.no_grad()
def test_alibi_lowers_scores_by_slope_and_distance() -> None:
    """In the first layer, whose inputs are the same: log a(t, s) changes by slope·(s - t), up to a constant of t."""
    ids, slopes = tokens(length=9), [0.5, 0.25, 0.01, 1.5]
    found = []
    for changes in ({}, {"alibi_slopes": slopes}):
        model = native("no-rope", **changes)
        model.set_attn_implementation("eager")
        found.append(model(ids, use_cache=False, output_attentions=True).attentions[0].double().log())
    change = found[1] - found[0]
    for t in range(1, 9):
        seen = change[:, :, t, : t + 1]
        expected = torch.tensor(slopes).double()[:, None] * torch.arange(t + 1)
        assert near(seen - seen[..., :1], expected.expand_as(seen), tolerance=1e-4)  # logarithms of small float32
    model = native("no-rope", alibi_slopes=slopes)
    outputs = model(ids[:, :5], use_cache=True)
    rest = model(ids[:, 5:], past_key_values=cache_of(outputs)).logits
    assert near(rest, model(ids, use_cache=False).logits[:, 5:])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm": "batch"}, "norm must be one of"),
        ({"mlp": "wide"}, "mlp must be one of"),
        ({"qk_norm": "layer"}, "qk_norm must be one of"),
        ({"qk_norm": "head"}, "qk_norm needs"),
        ({"alibi_slopes": [0.5]}, "alibi_slopes must hold 4 values, got 1"),
        ({**EXPERTS, "expert_layers": [True]}, "expert_layers must hold 3 values, got 1"),
        ({**EXPERTS, "num_experts_per_tok": 6}, "must be 1 to 5, got 6"),
        ({"rope_pairs": [[0, 1, 2]] * 3}, "go together"),
        ({"rope_update": {"kind": "other"}, "rope_pairs": [[0, 1, 2]] * 3}, "'other'"),
        ({"rope_update": {"kind": "dynamic"}, "rope_pairs": [[0]] * 3}, r"\[3, 3, 3\], found \[1, 1, 1\]"),
    ],
)
def test_a_config_that_says_what_is_not_possible_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**changes)


def test_config_json_holds_only_what_differs_from_a_llama() -> None:
    plain = config().to_dict()
    assert {"norm", "mlp", "num_experts", "embedding_scale", "qk_norm", "rope_update"}.isdisjoint(plain)
    changes = {"norm": "layer", "embedding_scale": 3.0, **EXPERTS, "expert_layers": [True, False, True]}
    fields = config(**changes).to_dict()
    assert fields.keys() - plain.keys() == changes.keys()
    again = MLAConfig.from_dict(fields)
    assert {name: getattr(again, name) for name in changes} == changes


@pytest.mark.parametrize(("kind", "scales"), [("head", 2), ("all", 1)])
def test_key_scales_are_one_for_each_norm_of_keys(kind: str, scales: int) -> None:
    assert config().key_scales == 0
    assert config(qk_norm=kind, qk_norm_dim=8, qk_norm_key_heads=2).key_scales == scales
