from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from mla_convert.errors import UnaccountedTensorError
from mla_convert.sources import open_source
from mla_convert.sources.loading import build_model
from tests.tiny import save_source, tiny_llama
from tests.tiny_families import tiny_bloom, tiny_gpt_neox, tiny_mixtral


def _build(model_class: Any, model: Any) -> Any:
    return build_model(
        model_class,
        model.config,
        iter(model.state_dict().items()),
        head="lm_head.weight",
        generation_config=GenerationConfig(),
        dtype=torch.float32,
        attn_implementation="sdpa",
        device="cpu",
    )


def test_a_buffer_that_its_class_does_not_fill_is_an_error_that_names_it() -> None:
    class Changed(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.layers[1].register_buffer("offsets", torch.ones(3), persistent=False)

    with pytest.raises(UnaccountedTensorError, match=r"model\.layers\.1\.offsets"):
        _build(Changed, tiny_llama())


def test_a_parameter_without_a_stored_tensor_is_an_error_that_names_it() -> None:
    class Changed(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.extra = torch.nn.Linear(2, 2, bias=False)

    with pytest.raises(UnaccountedTensorError, match=r"model\.extra\.weight"):
        _build(Changed, tiny_llama())


def test_filling_a_buffer_leaves_the_parameters_beside_it_alone() -> None:
    class Changed(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.embed_tokens.register_buffer("scale", torch.ones(()), persistent=False)

        def _init_weights(self, module: torch.nn.Module) -> None:
            super()._init_weights(module)
            if hasattr(module, "scale"):
                module.scale.fill_(3.0)

    model = tiny_llama()
    loaded = _build(Changed, model)
    assert loaded.model.embed_tokens.scale == 3.0
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_frequencies_stay_in_float32(tmp_path: Path) -> None:
    model = tiny_gpt_neox()
    loaded: Any = open_source(str(save_source(model, tmp_path))).load_model(dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert loaded.gpt_neox.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(loaded.gpt_neox.rotary_emb.inv_freq, model.gpt_neox.rotary_emb.inv_freq)


def test_a_class_without_fused_attention_runs_its_own(tmp_path: Path) -> None:
    loaded = open_source(str(save_source(tiny_bloom(), tmp_path))).load_model(dtype=torch.float32)
    assert loaded.config._attn_implementation == "eager"


def test_experts_are_stacked_gate_above_up(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_mixtral(), tmp_path)))
    experts: Any = source.load_model(dtype=torch.float32).get_submodule("model.layers.1.mlp.experts")
    stored = "model.layers.1.block_sparse_moe.experts.2."
    assert torch.equal(experts.gate_up_proj[2, :96], source.tensor(stored + "w1.weight"))
    assert torch.equal(experts.gate_up_proj[2, 96:], source.tensor(stored + "w3.weight"))
    assert torch.equal(experts.down_proj[2], source.tensor(stored + "w2.weight"))
