import pytest
import torch

from mla_convert.heal.balance import balance
from tests.mla.native import VARIANTS, native, tokens


def skewed(variant: str) -> torch.nn.Module:
    """A model with factors as far apart as a closed-form conversion leaves them."""
    model = native(variant)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            rank, nope = attention.kv_lora_rank, attention.qk_nope_head_dim
            attention.kv_a_proj_with_mqa.weight[:rank] *= torch.logspace(-4, -2, rank)[:, None]
            attention.kv_b_proj.weight /= torch.logspace(-4, -2, rank)
            attention.kv_a_proj_with_mqa.weight[rank:] *= 1e-4
            attention.q_proj.weight.view(attention.num_heads, -1, attention.q_proj.in_features)[:, nope:] *= 1e4
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_model_computes_does_not_change_by_a_bit(variant):
    model = skewed(variant)
    with torch.no_grad():
        before = model(input_ids=tokens(), use_cache=False).logits
        balance(model)
        after = model(input_ids=tokens(), use_cache=False).logits
    assert torch.equal(before, after)


@pytest.mark.parametrize("variant", ["plain", "biases", "no-rope", "one-head", "unequal"])
def test_both_sides_of_every_product_are_of_one_size(variant):
    model = skewed(variant)
    balance(model)
    config = model.config
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    for i, layer in enumerate(model.model.layers):
        rank, rope = config.kv_rank_of(i), config.rope_dim_of(i)
        weights = {name: value.detach() for name, value in layer.self_attn.named_parameters()}
        down = weights["kv_a_proj_with_mqa.weight"]
        up = weights["kv_b_proj.weight"].view(heads, -1, rank)
        query = weights["q_proj.weight"].view(heads, nope + rope, -1)
        output = weights["o_proj.weight"].view(config.hidden_size, heads, -1)

        def size(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
            return tensor.square().mean(dim=dims).sqrt()

        ratios = [
            size(down[:rank], 1) / size(up, 0, 1),
            size(query[:, :nope], 2) / size(up[:, :nope], 2),
            size(up[:, nope:], 2) / size(output, 0).view(heads, -1),
        ]
        if rope:
            slots = down[rank:].view(2, rope // 2, -1)
            ratios.append(size(slots, 0, 2) / size(query[:, nope:].view(heads, 2, rope // 2, -1), 0, 1, 3))
        for ratio in ratios:
            # a power of two is off by at most half an octave on either side, and later products move earlier ones
            assert ratio.log2().abs().max() <= 2.0


def test_a_channel_of_zeros_is_left_alone():
    model = native()
    with torch.no_grad():
        model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight[3] = 0.0
    balance(model)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
