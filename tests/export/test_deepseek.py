"""The stock folder: unmodified transformers loads it, and exact weights give the source's logits back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM

from mla_convert.errors import FormatError
from mla_convert.export.deepseek import check_deepseek, longrope_parameters, write_deepseek
from mla_convert.export.native import write_native
from mla_convert.export.reload import compare_logits, reload_logits, verify_folder
from mla_convert.sources import Source, open_source
from mla_convert.spec import MLAShape
from tests.export.exact import exact_layers, exact_shape, random_layers
from tests.export.test_native import prompt, source_logits
from tests.tiny import LLAMA3_ROPE, save_source, tiny_llama, tiny_mistral, tiny_qwen2

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EPS = {"rms_norm_eps": 1e-6}

FAMILIES = {
    "llama-mha": lambda: tiny_llama("MHA", **EPS),
    "llama-gqa": lambda: tiny_llama("GQA", **EPS),
    "llama-mqa": lambda: tiny_llama("MQA", **EPS),
    "llama-tied": lambda: tiny_llama(tied=True, **EPS),
    "llama-bias": lambda: tiny_llama(bias=True, **EPS),
    "llama3": lambda: tiny_llama(llama3=True, **EPS),
    "llama-gelu": lambda: tiny_llama(hidden_act="gelu", **EPS),
    "mistral": lambda: tiny_mistral(**EPS),
    "qwen2-gqa": lambda: tiny_qwen2(**EPS),
    "qwen2-mha": lambda: tiny_qwen2("MHA", **EPS),
}


def free_rope(source: Source) -> dict[str, Any]:
    frequencies = source.spec.rope.inv_freq * source.spec.num_kv_heads
    return longrope_parameters(frequencies, 10000.0, source.spec.max_position_embeddings)


def written(source: Source, folder: Path, rope_parameters: Mapping[str, Any], **options: Any) -> Path:
    folder.mkdir()
    options = {"dtype": torch.float32, **options}
    write_deepseek(
        source, exact_layers(source), exact_shape(source.spec), folder, rope_parameters=rope_parameters, **options
    )
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_weights_at_free_frequencies_give_the_sources_logits(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family]()
    source = open_source(str(save_source(model, tmp_path / "source")))
    folder = written(source, tmp_path / "out", free_rope(source))
    check = compare_logits(reload_logits(folder, prompt()), source_logits(model, prompt()))
    # the factors carry the frequencies through float32, and the latent norm departs from linear by up to 2^-20
    assert check.max_logit_difference <= 1e-3
    assert check.top1_agreement == 1.0


@pytest.mark.parametrize(("llama3", "parameters"), [(False, DEFAULT_ROPE), (True, LLAMA3_ROPE)])
def test_one_kv_head_is_exact_at_the_classs_own_frequencies(
    tmp_path: Path, llama3: bool, parameters: dict[str, Any]
) -> None:
    model = tiny_llama("MQA", llama3=llama3, **EPS)
    source = open_source(str(save_source(model, tmp_path / "source")))
    folder = written(source, tmp_path / "out", parameters, max_shard_size="20KB")
    verify_folder(folder, prompt(), source_logits(model, prompt()), tolerance=1e-4)
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_type"] == parameters["rope_type"]


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("rope_type", ["default", "yarn"])
def test_stock_and_native_agree_on_any_weights(tmp_path: Path, biases: bool, rope_type: str) -> None:
    """Two classes that share no code: content scores, values, scales and biases in use, which exact weights leave
    at zero. N, V, C and R all differ."""
    source = open_source(str(save_source(tiny_llama(**EPS), tmp_path / "source")))
    shape = MLAShape(kv_rank=20, rope_dim=8, nope_dim=12, value_dim=10)
    yarn = {"factor": 1.0, "original_max_position_embeddings": 256} if rope_type == "yarn" else {}
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, **yarn}
    frequencies = tuple(10000.0 ** (-slot / 4) for slot in range(4))
    for name in ("native", "stock"):
        (tmp_path / name).mkdir()
    layers = list(random_layers(source.spec, shape, frequencies, biases=biases))
    write_native(source, layers, shape, tmp_path / "native", dtype=torch.float32)
    write_deepseek(source, layers, shape, tmp_path / "stock", dtype=torch.float32, rope_parameters=parameters)
    native = reload_logits(tmp_path / "native", prompt())
    assert native.std() > 0.5
    verify_folder(tmp_path / "stock", prompt(), native, tolerance=1e-4)


def test_a_yarn_classs_own_factors_are_undone(tmp_path: Path) -> None:
    """YaRN scales cos and sin, and with mscale_all_dim the softmax too; the weights must not answer to either."""
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    model = tiny_llama("MQA", rope_parameters=dict(yarn), **EPS)
    source = open_source(str(save_source(model, tmp_path / "source")))
    assert source.spec.rope.attention_scaling > 1
    for name, parameters in {"same": yarn, "other": {**yarn, "mscale": 1.0, "mscale_all_dim": 0.5}}.items():
        folder = written(source, tmp_path / name, parameters)
        verify_folder(folder, prompt(), source_logits(model, prompt()), tolerance=1e-4)


def test_the_folder_is_a_dense_stock_model(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_llama("MQA", tied=True, **EPS), tmp_path / "source")))
    folder = written(source, tmp_path / "out", DEFAULT_ROPE, dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "dtype": "bfloat16",
        "first_k_dense_replace": 2,
        "q_lora_rank": None,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "rope_interleave": True,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }
    assert {key: config.get(key) for key in expected} == expected
    assert "auto_map" not in config
    tensors = load_file(folder / "model.safetensors")
    torch.testing.assert_close(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    norm = tensors["model.layers.0.self_attn.kv_a_layernorm.weight"].double()
    assert norm.unique().numel() == 1
    assert math.log2(norm[0]) == round(math.log2(norm[0]))
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is DeepseekV3ForCausalLM


def test_what_is_cached_has_its_natural_size(tmp_path: Path) -> None:
    model = tiny_llama("MQA", **EPS)
    source = open_source(str(save_source(model, tmp_path / "source")))
    stock = AutoModelForCausalLM.from_pretrained(written(source, tmp_path / "out", DEFAULT_ROPE))
    with torch.no_grad():
        outputs = stock(prompt(), use_cache=True)
        values = model(prompt(), use_cache=True)
    cache = getattr(outputs, "cache", None) or outputs.past_key_values
    source_cache = getattr(values, "cache", None) or values.past_key_values
    ratio = cache.layers[0].keys / source_cache.layers[0].values
    # gain = sqrt(eps)/(s·w) with w the nearest power of two
    torch.testing.assert_close(ratio, torch.full_like(ratio, 1024 / 1048.576), rtol=1e-4, atol=0)


def test_huge_activations_stay_linear(tmp_path: Path) -> None:
    """A latent a thousand times larger would meet the norm at 2^-20; the scale follows the weights."""
    model = tiny_llama("MQA", **EPS)
    with torch.no_grad():
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.self_attn.v_proj.weight.mul_(1000)
            layer.self_attn.o_proj.weight.div_(1000)
    source = open_source(str(save_source(model, tmp_path / "source")))
    folder = written(source, tmp_path / "out", DEFAULT_ROPE)
    verify_folder(folder, prompt(), source_logits(model, prompt()), tolerance=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_another_eps_is_met_exactly_by_a_scaled_residual_stream(tmp_path: Path, tied: bool) -> None:
    model = tiny_llama("MQA", bias=True, tied=tied, rms_norm_eps=1e-2)
    source = open_source(str(save_source(model, tmp_path / "source")))
    for name, engine_eps in (("engines", True), ("transformers", False)):
        folder = written(source, tmp_path / name, DEFAULT_ROPE, engine_eps=engine_eps)
        verify_folder(folder, prompt(), source_logits(model, prompt()), tolerance=1e-4)
        config = json.loads((folder / "config.json").read_text())
        assert config["rms_norm_eps"] == (1e-6 if engine_eps else 1e-2)


def test_between_16_bit_types_weights_are_not_rounded_twice(tmp_path: Path) -> None:
    model = tiny_llama("MQA", dtype=torch.bfloat16)
    source = open_source(str(save_source(model, tmp_path / "source")))
    folder = written(source, tmp_path / "out", DEFAULT_ROPE, dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        assert torch.equal(stored[name], model.state_dict()[name])
    assert any("instead of the source's 1e-05" in note for note in check_deepseek(source.spec))


def test_frequencies_that_are_not_the_classs_are_refused(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_llama("GQA"), tmp_path / "source")))
    with pytest.raises(FormatError, match=r"layer 0's RoPE slot 1 turns by 0\.316"):
        written(source, tmp_path / "out", DEFAULT_ROPE)
    with pytest.raises(FormatError, match="layer 0's RoPE slot"):
        written(source, tmp_path / "theta", {**free_rope(source), "rope_theta": 10000.5})


def test_float16_is_refused(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_llama("MQA"), tmp_path / "source")))
    with pytest.raises(FormatError, match="float16") as caught:
        written(source, tmp_path / "out", DEFAULT_ROPE, dtype=torch.float16)
    assert "bfloat16" in caught.value.remedy
    assert not list((tmp_path / "out").iterdir())


def test_bfloat16_stays_linear(tmp_path: Path) -> None:
    model = tiny_llama("MQA", dtype=torch.bfloat16, **EPS)
    source = open_source(str(save_source(model, tmp_path / "source")))
    stored = reload_logits(written(source, tmp_path / "stock", DEFAULT_ROPE, dtype=torch.bfloat16), prompt())
    reference = source_logits(model.float(), prompt())
    # rounding of the factors folded into W_Q and kv_b_proj to 8 bits, and no more: a norm in effect is off by nats
    assert compare_logits(stored, reference).max_logprob_difference < 0.2


def test_a_sliding_window_ends_the_context(tmp_path: Path) -> None:
    model = tiny_mistral("MQA", window=24, **EPS)
    source = open_source(str(save_source(model, tmp_path / "source")))
    folder = written(source, tmp_path / "out", DEFAULT_ROPE)
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 24
    inside = prompt(24)
    verify_folder(folder, inside, source_logits(model, inside), tolerance=1e-4)
    assert any("24" in note and "window" in note for note in check_deepseek(source.spec))


def test_a_bias_in_the_feed_forward_is_refused(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_llama(mlp_bias=True), tmp_path / "source")))
    with pytest.raises(FormatError, match="feed-forward"):
        check_deepseek(source.spec)


def test_rope_that_changes_with_the_length_is_refused(tmp_path: Path) -> None:
    spec = open_source(str(save_source(tiny_llama(), tmp_path / "source"))).spec
    with pytest.raises(FormatError, match="dynamic"):
        check_deepseek(spec, rope_parameters={"rope_type": "dynamic"})
    factors = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    with pytest.raises(FormatError, match="longrope"):
        check_deepseek(spec, rope_parameters=factors)


def test_notes_name_each_constraint(tmp_path: Path) -> None:
    plain = open_source(str(save_source(tiny_llama(**EPS), tmp_path / "source"))).spec
    assert len(check_deepseek(plain)) == 1
    cases = {
        "1e-05": replace(plain, rms_norm_eps=1e-5),
        "query latent": replace(plain, query_bias=True),
        "gelu": replace(plain, hidden_act="gelu"),
        "attention_bias": replace(plain, value_bias=True),
    }
    for word, spec in cases.items():
        assert any(word in note for note in check_deepseek(spec)), word
    assert any("llama3" in note for note in check_deepseek(plain, rope_parameters=LLAMA3_ROPE))


def test_longrope_factors_meet_the_frequencies() -> None:
    frequencies = (1.0, 0.5, 0.5, 1e-4)
    parameters = longrope_parameters(frequencies, 500.0, 128)
    computed = [1 / (f * 500.0 ** (2 * i / 8)) for i, f in enumerate(parameters["short_factor"])]
    assert computed == pytest.approx(frequencies, rel=1e-6)
    assert parameters["short_factor"] == parameters["long_factor"]
    with pytest.raises(FormatError, match="positive"):
        longrope_parameters((1.0, 0.0), 500.0, 128)
