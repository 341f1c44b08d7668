from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source, save_tensors, stored_tensors
from tests.tiny_families import tiny_gpt_neox


class TestGPTNeoX(AdapterConformance):
    attention_path = "gpt_neox.layers.{}.attention"
    output_path = "dense"
    stored_attention = "gpt_neox.layers.{}.attention."
    rotary_path = "gpt_neox.rotary_emb"
    dropped = ("gpt_neox.layers.0.attention.masked_bias", ())
    variants: ClassVar = {
        "parallel": tiny_gpt_neox,
        "sequential-tied": lambda: tiny_gpt_neox(tied=True, use_parallel_residual=False),
        "no-attention-bias": lambda: tiny_gpt_neox(attention_bias=False, hidden_act="gelu_new"),
        "bfloat16": lambda: tiny_gpt_neox(dtype=torch.bfloat16),
    }


def test_queries_keys_and_values_are_fused_head_by_head(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    source = open_source(str(save_source(tiny_gpt_neox(rope_parameters=rope), tmp_path)))
    fused = source.tensor("gpt_neox.layers.1.attention.query_key_value.weight")
    weights = source.attention(1)
    for head in range(4):
        start = 48 * head
        assert torch.equal(weights.w_q[head], fused[start : start + 16])
        assert torch.equal(weights.w_k[head], fused[start + 16 : start + 32])
        assert torch.equal(weights.w_v[head], fused[start + 32 : start + 48])


def test_the_output_embedding_has_the_hubs_name(tmp_path: Path) -> None:
    model = tiny_gpt_neox()
    save_tensors(stored_tensors(model), save_source(model, tmp_path))
    assert "embed_out.weight" in open_source(str(tmp_path)).tensor_names()
