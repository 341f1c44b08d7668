"""Exact MLA forms of a source layer, written by hand from the source's own weights: nothing is factorised."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mla_convert.mla import MLAWeights
from mla_convert.plan import make_plan
from mla_convert.recipe import load_recipe
from mla_convert.sources import AttentionWeights, Source
from mla_convert.spec import MLAShape, SourceSpec
from mla_convert.transform import convert_layer


def exact_shape(spec: SourceSpec) -> MLAShape:
    """Every pair of every KV head has a slot, and the latent holds all values."""
    width = spec.num_kv_heads * spec.head_dim
    return MLAShape(kv_rank=width, rope_dim=width, nope_dim=spec.head_dim, value_dim=spec.head_dim)


def exact_layer(attention: AttentionWeights, spec: SourceSpec) -> MLAWeights:
    """Keys in k_rope (slot g·K/2 + l turns as pair l of KV head g), values in the latent, no content scores."""
    w_k, w_v = attention.w_k.double(), attention.w_v.double()
    groups, dim, width = w_k.shape
    heads = spec.num_heads

    def slots(per_group: torch.Tensor) -> torch.Tensor:
        """[G K ...] in rotate-half order -> [G·K ...]: all real parts, then all imaginary parts."""
        return torch.cat((per_group[:, : dim // 2].flatten(0, 1), per_group[:, dim // 2 :].flatten(0, 1)))

    def own_slots(query: torch.Tensor, head: int) -> torch.Tensor:
        """A head's query [K ...] at the slots of its own group, zero elsewhere."""
        spread = query.new_zeros(groups, *query.shape)
        spread[head // (heads // groups)] = query
        return slots(spread)

    reads = torch.zeros(heads, dim, groups, dim, dtype=torch.float64)
    for head in range(heads):
        reads[head, :, head // (heads // groups)] = torch.eye(dim, dtype=torch.float64)
    b_q, b_k, b_v, b_o = (
        None if b is None else b.double() for b in (attention.b_q, attention.b_k, attention.b_v, attention.b_o)
    )
    biased = b_k is not None or b_v is not None
    return MLAWeights(
        w_dkv=w_v.flatten(0, 1),
        w_kr=slots(w_k),
        w_uk=torch.zeros(heads, dim, groups * dim, dtype=torch.float64),
        w_uv=reads.flatten(2),
        w_uq=torch.zeros(heads, dim, width, dtype=torch.float64),
        w_qr=torch.stack([own_slots(attention.w_q[h].double(), h) for h in range(heads)]),
        w_o=attention.w_o.double(),
        inv_freq=spec.rope.inv_freq * groups,
        b_dkv=_or_zeros(b_v, groups * dim).flatten() if biased else None,
        b_kr=slots(_or_zeros(b_k, groups, dim)) if biased else None,
        b_uq=None if b_q is None else torch.zeros(heads, dim, dtype=torch.float64),
        b_qr=None if b_q is None else torch.stack([own_slots(b_q[h], h) for h in range(heads)]),
        b_o=b_o,
    )


def exact_layers(source: Source) -> Iterator[tuple[int, MLAWeights]]:
    """Every layer, made when its turn comes."""
    for i in range(source.spec.num_layers):
        yield i, exact_layer(source.attention(i), source.spec)


def converted_layers(source: Source) -> tuple[list[tuple[int, MLAWeights]], MLAShape]:
    """Every layer of any source at full size, as the conversion makes it, and the shape of each."""
    recipe = load_recipe("exact")
    shape = make_plan(source.spec, recipe=recipe).layers[0]
    layers = [
        (i, convert_layer(source.attention(i), None, source.spec.rope_of(i), shape, recipe).weights)
        for i in range(source.spec.num_layers)
    ]
    return layers, shape


def random_layers(
    spec: SourceSpec, shape: MLAShape, inv_freq: tuple[float, ...], *, biases: bool
) -> Iterator[tuple[int, MLAWeights]]:
    """Layers with every part in use: content scores, RoPE scores, values and, where asked for, all biases."""
    generator = torch.Generator().manual_seed(3)

    def random(*size: int) -> torch.Tensor:
        fan_in = size[-1] if len(size) > 1 else 4
        return torch.randn(size, generator=generator, dtype=torch.float64) / fan_in**0.5

    heads, width = spec.num_heads, spec.hidden_size
    rank, rope, nope, value = shape.kv_rank, shape.rope_dim, shape.nope_dim, shape.value_dim
    for i in range(spec.num_layers):
        yield (
            i,
            MLAWeights(
                w_dkv=random(rank, width),
                w_kr=random(rope, width),
                w_uk=random(heads, nope, rank),
                w_uv=random(heads, value, rank),
                w_uq=random(heads, nope, width),
                w_qr=random(heads, rope, width),
                w_o=random(width, heads, value),
                inv_freq=inv_freq,
                b_dkv=random(rank) if biases else None,
                b_kr=random(rope) if biases else None,
                b_uq=random(heads, nope) if biases else None,
                b_qr=random(heads, rope) if biases else None,
                b_o=random(width) if biases else None,
            ),
        )


def _or_zeros(bias: torch.Tensor | None, *size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.float64) if bias is None else bias
