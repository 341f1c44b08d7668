from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source, save_tensors, stored_tensors
from tests.tiny_families import tiny_gpt2


class TestGPT2(AdapterConformance):
    attention_path = "transformer.h.{}.attn"
    output_path = "c_proj"
    stored_attention = "transformer.h.{}.attn."
    rotary_path = None
    dropped = ("transformer.h.0.attn.bias", (1, 1, 256, 256))
    shifts = False
    variants: ClassVar = {
        "tied": tiny_gpt2,
        "untied": lambda: tiny_gpt2(tied=False, n_inner=96, activation_function="relu"),
        "unscaled": lambda: tiny_gpt2(scale_attn_weights=False),
        "bfloat16": lambda: tiny_gpt2(dtype=torch.bfloat16),
    }


def test_projections_are_turned_into_out_by_in(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_gpt2(), tmp_path)))
    fused = source.tensor("transformer.h.0.attn.c_attn.weight")
    weights = source.attention(0)
    assert fused.shape == (64, 192)
    assert torch.equal(weights.w_q[1], fused[:, 16:32].T)
    assert torch.equal(weights.w_k[1], fused[:, 64 + 16 : 64 + 32].T)
    assert torch.equal(weights.w_v[1], fused[:, 128 + 16 : 128 + 32].T)
    stored = source.tensor("transformer.h.0.mlp.c_fc.weight")
    (up,) = [part for name, part in source.copied(0) if name == "transformer.h.0.mlp.c_fc.weight"]
    assert torch.equal(up.take(stored), stored.T)


def test_names_without_their_prefix_are_read_as_those_with_it(tmp_path: Path) -> None:
    model = tiny_gpt2()
    folder = save_source(model, tmp_path)
    short = {name.removeprefix("transformer."): value for name, value in stored_tensors(model).items()}
    save_tensors(
        short | {"h.1.attn.bias": torch.ones(1, 1, 8, 8), "lm_head.weight": short["wte.weight"].clone()}, folder
    )
    source = open_source(str(folder))
    assert source.spec.tie_word_embeddings
    assert "transformer.wpe.weight" in source.tensor_names()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(source.load_model(dtype=torch.float32)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("field", ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"])
def test_other_forms_of_attention_are_refused_by_name(tmp_path: Path, field: str) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=field):
        open_source(str(save_source(tiny_gpt2(**{field: True}), tmp_path)))


def test_heads_of_an_odd_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="even size"):
        open_source(str(save_source(tiny_gpt2(n_embd=60), tmp_path)))
