"""How many numbers a model's parts hold, against tensors that are really there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_convert.mla.names import to_hf
from mla_convert.plan import make_plan
from mla_convert.recipe import load_recipe
from mla_convert.sizes import converted_attention, embedding_weights, feed_forward_weights, source_attention
from mla_convert.sources import open_source
from mla_convert.spec import BlockSpec, MLAShape, QKNormSpec
from mla_convert.transform import convert_layer
from tests import tiny, tiny_families
from tests.mla.native import native
from tests.test_features import PLAIN
from tests.tiny import save_source, tiny_llama

FAMILIES: dict[str, Callable[[], Any]] = {
    name.removeprefix("tiny_"): make
    for module in (tiny, tiny_families)
    for name, make in vars(module).items()
    if name.startswith("tiny_") and name != "tiny_tokenizer" and make.__module__ == module.__name__
}


def test_the_sources_numbers_are_all_counted(tmp_path: Path) -> None:
    for tied in (True, False):
        model = tiny_llama(tied=tied)
        spec = open_source(str(save_source(model, tmp_path / str(tied)))).spec
        counted = embedding_weights(spec) + 2 * (feed_forward_weights(spec, 0) + source_attention(spec))
        matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
        assert counted == matrices


def test_the_converted_attentions_numbers_are_all_counted() -> None:
    attention = native().model.layers[0].self_attn
    spec = replace(PLAIN, hidden_size=36, num_heads=4, head_dim=8)
    shape = MLAShape(kv_rank=10, rope_dim=6, nope_dim=8, value_dim=7)
    assert converted_attention(spec, shape) == sum(p.numel() for p in attention.parameters() if p.ndim == 2)


def test_experts_and_norms_of_keys_count() -> None:
    block = BlockSpec(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=5, expert_layers=(True, False) * 2)
    mixed = replace(PLAIN, block=block)
    assert feed_forward_weights(mixed, 0) == 4 * 3 * 32 * 5 + 4 * 32  # experts and their router
    assert feed_forward_weights(mixed, 1) == feed_forward_weights(PLAIN, 1) == 3 * 32 * 64
    shared = replace(PLAIN, block=replace(block, shared_expert_intermediate_size=7))
    assert feed_forward_weights(shared, 0) - feed_forward_weights(mixed, 0) == 3 * 32 * 7 + 32
    assert feed_forward_weights(replace(PLAIN, block=BlockSpec(mlp="plain")), 0) == 2 * 32 * 64
    shape, normed = MLAShape(10, 4, 8, 8, 2), replace(PLAIN, qk_norm=QKNormSpec("head", 1e-6))
    # the source's own queries and keys (4 + 2 heads of 8), and a block [12, 8] a head in place of rows of 32
    more = converted_attention(normed, shape) - converted_attention(PLAIN, shape)
    assert more == (4 + 2) * 8 * 32 + 4 * 12 * 8 - 4 * 12 * 32


@pytest.mark.parametrize("family", FAMILIES)
def test_of_no_family_more_is_counted_than_is_written(family: str, tmp_path: Path) -> None:
    """A conversion is refused by what is counted; norms and biases are not, which in tiny models are many."""
    source = open_source(str(save_source(FAMILIES[family](), tmp_path)))
    spec, recipe = source.spec, load_recipe("exact")
    shape = make_plan(spec, recipe=recipe, cache=1.0).layers[0]
    counted = embedding_weights(spec) + sum(feed_forward_weights(spec, i) for i in range(spec.num_layers))
    counted += spec.num_layers * converted_attention(spec, shape)
    copied = [part for layer in (None, *range(spec.num_layers)) for part in source.copied(layer)]
    written = sum(part.take(source.tensor(name)).numel() for name, part in copied)
    for i in range(spec.num_layers):
        converted = convert_layer(source.attention(i), None, spec.rope_of(i), shape, recipe)
        written += sum(tensor.numel() for tensor in to_hf(converted.weights.to(torch.float32)).values())
    assert 0.85 * written < counted <= written
