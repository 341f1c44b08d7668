"""The table between paper symbols and tensor names, both ways, against the layout spelt out row by row."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from mla_convert.mla.names import from_hf, to_hf
from mla_convert.mla.weights import MLAWeights
from mla_convert.spec import MLAShape

HEADS, WIDTH = 3, 11
SHAPE = MLAShape(kv_rank=5, rope_dim=4, nope_dim=6, value_dim=7)
INV_FREQ = (1.0, 0.25)


def weights(*, query_bias: bool = True, latent_bias: bool = True, output_bias: bool = True) -> MLAWeights:
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    rank, rope, nope, value = SHAPE.kv_rank, SHAPE.rope_dim, SHAPE.nope_dim, SHAPE.value_dim
    return MLAWeights(
        w_dkv=random(rank, WIDTH),
        w_kr=random(rope, WIDTH),
        w_uk=random(HEADS, nope, rank),
        w_uv=random(HEADS, value, rank),
        w_uq=random(HEADS, nope, WIDTH),
        w_qr=random(HEADS, rope, WIDTH),
        w_o=random(WIDTH, HEADS, value),
        inv_freq=INV_FREQ,
        b_dkv=random(rank) if latent_bias else None,
        b_kr=random(rope) if latent_bias else None,
        b_uq=random(HEADS, nope) if query_bias else None,
        b_qr=random(HEADS, rope) if query_bias else None,
        b_o=random(WIDTH) if output_bias else None,
    )


BIASES = [
    {"query_bias": q, "latent_bias": kv, "output_bias": o}
    for q in (True, False)
    for kv in (True, False)
    for o in (True, False)
]


@pytest.mark.parametrize("biases", BIASES, ids=str)
def test_names_go_there_and_back(biases: dict[str, bool]) -> None:
    before = weights(**biases)
    after = from_hf(to_hf(before), SHAPE, HEADS, INV_FREQ)
    for field in fields(MLAWeights):
        one, other = getattr(before, field.name), getattr(after, field.name)
        assert (one is None) == (other is None)
        assert one is None or one == other if field.name == "inv_freq" else one is None or torch.equal(one, other)


@pytest.mark.parametrize("biases", BIASES, ids=str)
def test_only_biases_that_exist_are_named(biases: dict[str, bool]) -> None:
    names = {name for name in to_hf(weights(**biases)) if name.endswith(".bias")}
    modules = {"query_bias": "q_proj", "latent_bias": "kv_a_proj_with_mqa", "output_bias": "o_proj"}
    assert names == {f"{modules[kind]}.bias" for kind, there in biases.items() if there}


def test_rows_lie_where_deepseeks_classes_read_them() -> None:
    w = weights()
    tensors = to_hf(w)
    nope, rope, value, rank = SHAPE.nope_dim, SHAPE.rope_dim, SHAPE.value_dim, SHAPE.kv_rank
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "q_proj.weight": (HEADS * (nope + rope), WIDTH),
        "q_proj.bias": (HEADS * (nope + rope),),
        "kv_a_proj_with_mqa.weight": (rank + rope, WIDTH),
        "kv_a_proj_with_mqa.bias": (rank + rope,),
        "kv_b_proj.weight": (HEADS * (nope + value), rank),
        "o_proj.weight": (WIDTH, HEADS * value),
        "o_proj.bias": (WIDTH,),
    }
    for h in range(HEADS):
        q = h * (nope + rope)
        assert torch.equal(tensors["q_proj.weight"][q : q + nope], w.w_uq[h])
        assert torch.equal(tensors["q_proj.weight"][q + nope : q + nope + rope], w.w_qr[h])
        kv = h * (nope + value)
        assert torch.equal(tensors["kv_b_proj.weight"][kv : kv + nope], w.w_uk[h])
        assert torch.equal(tensors["kv_b_proj.weight"][kv + nope : kv + nope + value], w.w_uv[h])
        assert torch.equal(tensors["o_proj.weight"][:, h * value : (h + 1) * value], w.w_o[:, h])
    assert torch.equal(tensors["kv_a_proj_with_mqa.weight"][:rank], w.w_dkv)
    assert torch.equal(tensors["kv_a_proj_with_mqa.weight"][rank:], w.w_kr)


def test_a_missing_weight_is_named() -> None:
    tensors = to_hf(weights())
    del tensors["kv_b_proj.weight"]
    with pytest.raises(KeyError, match=r"kv_b_proj\.weight"):
        from_hf(tensors, SHAPE, HEADS, INV_FREQ)


def test_a_layer_knows_its_sizes_and_changes_its_type() -> None:
    w = weights(output_bias=False)
    assert w.shape == SHAPE
    narrow = w.to(torch.bfloat16)
    assert narrow.inv_freq == INV_FREQ
    assert narrow.b_o is None
    for field in fields(MLAWeights):
        tensor = getattr(narrow, field.name)
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, getattr(w, field.name).to(torch.bfloat16))
    assert replace(w, b_kr=None).to(torch.float32).b_kr is None
