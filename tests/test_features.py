"""What is said of a source, from its description alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mla_convert.features import TRAITS, cached_besides, features, rope_sentence, traits
from mla_convert.spec import BlockSpec, QKNormSpec, RopeSpec, RopeUpdate, SourceSpec, no_rope

ROPE = RopeSpec(8, (1.0, 0.1, 0.01, 0.001), parameters={"rope_theta": 10000.0})
PLAIN = SourceSpec(
    architecture="LlamaForCausalLM",
    family="llama",
    num_layers=4,
    hidden_size=32,
    intermediate_size=64,
    vocab_size=100,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=ROPE,
    attention_scale=8**-0.5,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    max_position_embeddings=128,
    query_bias=False,
    key_bias=False,
    value_bias=False,
    output_bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
    windows=(None,) * 4,
    dtype="float32",
)
PARTIAL = RopeSpec(4, (1.0, 0.1, 0.0, 0.0), interleaved=True, attention_scaling=1.2)
OTHERS = {
    "scale": (replace(PLAIN, attention_scale=0.25), ["scaled by 0.25 instead of 0.353553"]),
    "softcap": (replace(PLAIN, attention_softcap=50.0), ["capped at 50"]),
    "ALiBi": (replace(PLAIN, alibi_slopes=(0.5,) * 4, rope=no_rope(8)), ["ALiBi", "no dims rotate"]),
    "QK-norm": (replace(PLAIN, qk_norm=QKNormSpec("all", 1e-6)), ["normalised over all heads together"]),
    "partial": (replace(PLAIN, rope=PARTIAL), ["4 of a head's 8 dims rotate"]),
    "dynamic": (replace(PLAIN, rope=replace(ROPE, update=RopeUpdate("dynamic", 64))), ["beyond 64 tokens (dynamic)"]),
    "two RoPEs": (replace(PLAIN, layer_ropes=(ROPE, ROPE, ROPE, PARTIAL)), ["layers differ in RoPE (default, theta 1"]),
    "window": (replace(PLAIN, windows=(None, 16, 16, 16)), ["3 of 4 layers attend to the last 16 tokens only"]),
    "windows": (replace(PLAIN, windows=(16,) * 4), ["all layers attend to the last 16"]),
    "biases": (replace(PLAIN, query_bias=True, mlp_bias=True), ["biases on queries, the feed-forward block"]),
    "experts": (
        replace(PLAIN, block=BlockSpec(num_experts=8, num_experts_per_tok=2, shared_expert_intermediate_size=16)),
        ["mixture of 8 experts, 2 a token", "one more expert"],
    ),
}


def test_nothing_is_special_about_llama() -> None:
    assert features(PLAIN) == ()
    assert cached_besides(PLAIN) is None


@pytest.mark.parametrize("kind", OTHERS)
def test_each_feature_is_said_and_nothing_else(kind: str) -> None:
    spec, expected = OTHERS[kind]
    said = features(spec)
    assert len(said) == len(expected)
    assert all(word in clause for word, clause in zip(expected, said, strict=True)), said


TRAITS_OF = {
    "scale": ("scales",),
    "softcap": ("softcaps",),
    "ALiBi": ("ALiBi",),
    "QK-norm": ("QK-norm",),
    "partial": ("partial RoPE", "neighbouring pairs"),
    "two RoPEs": ("partial RoPE", "neighbouring pairs", "RoPE by layer"),
    "window": ("windows",),
    "biases": ("biases",),
    "experts": ("experts",),
}


def test_traits_are_the_features_in_a_word() -> None:
    assert traits(PLAIN) == ()
    for kind, expected in TRAITS_OF.items():
        assert traits(OTHERS[kind][0]) == expected, kind
    block = BlockSpec(
        norm="layer", output_norms=True, parallel_residual=True, mlp="plain", learned_positions=4, logits_scale=2.0
    )
    expected = ("learned positions", "LayerNorm", "output norms", "parallel block", "ungated", "scales")
    assert traits(replace(PLAIN, block=block)) == expected
    assert set(expected) < set(TRAITS)


@pytest.mark.parametrize(("scope", "count"), [("head", "2 numbers"), ("all", "one number")])
def test_what_is_cached_beside_the_latent_is_counted(scope: str, count: str) -> None:
    spec = replace(PLAIN, qk_norm=QKNormSpec("head" if scope == "head" else "all", 1e-6))
    assert count in str(cached_besides(spec))


def test_rope_in_words() -> None:
    assert rope_sentence(ROPE) == "default, theta 10000, 4 pairs of dims half a head apart"
    assert rope_sentence(PARTIAL) == "default, 2 pairs of neighbouring dims, cos and sin times 1.2"
    assert rope_sentence(no_rope(8)) == "none"
