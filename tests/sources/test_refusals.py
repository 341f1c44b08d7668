"""What is refused, with a message and a remedy of its own, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mla_convert.sources.safetensors_reader as reader
from mla_convert.errors import MLAConvertError, SourceError, UnsupportedArchitectureError
from mla_convert.sources import open_source
from mla_convert.sources.refusals import nearest, refuse_gguf_architecture
from tests.tiny import save_source, tiny_llama

# config.json's fields -> words of the message, and of the remedy.
ARCHITECTURES: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown": ({"architectures": ["GemmaXForCausalLM"]}, "no source adapter for 'GemmaXForCausalLM'", "add-a-model"),
    "kin": ({"architectures": ["LlamaNewForCausalLM"]}, "nearest known kin: LlamaForCausalLM", "add-a-model"),
    "remote code": (
        {"architectures": ["InternLM2ForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.X"}},
        "lies beside its weights",
        "no code of a checkpoint is run",
    ),
    "encoder-decoder": ({"architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder", "decoder-only"),
    "encoder-decoder by field": (
        {"architectures": ["NewForTextToText"], "is_encoder_decoder": True},
        "encoder-decoder",
        "decoder-only",
    ),
    "decoder of one": ({"architectures": ["BartForCausalLM"]}, "encoder-decoder", "decoder-only"),
    "Gemma 3 with images": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}},
        "multimodal",
        "Gemma3ForCausalLM",
    ),
    "LLaVA": ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, "multimodal", "text-only"),
    "Qwen2-VL": ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "multimodal", "text-only"),
    "images by field": ({"architectures": ["LlavaLlamaForCausalLM"], "mm_vision_tower": "clip"}, "multimodal", "text"),
    "masked": ({"architectures": ["BertForMaskedLM"]}, "an encoder", "causal language model"),
    "encoder": ({"architectures": ["ModernBertModel"]}, "an encoder", "causal language model"),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "head of another task", "LlamaForCausalLM"),
    "reward": ({"architectures": ["Qwen2ForRewardModel"]}, "head of another task", "Qwen2ForCausalLM"),
    "body": ({"architectures": ["MistralModel"]}, "without its output head", "MistralForCausalLM"),
    "body of GPT-2": ({"architectures": ["GPT2Model"]}, "without its output head", "(GPT2LMHeadModel)"),
    "images in a body": (
        {"architectures": ["InternVLChatModel"], "vision_config": {"a": 1}},
        "multimodal",
        "text-only",
    ),
    "code of its own in a body": (
        {"architectures": ["ChatGLMModel"], "auto_map": {"AutoModel": "modeling_chatglm.X"}},
        "lies beside its weights",
        "no code of a checkpoint is run",
    ),
    "Mamba": ({"architectures": ["MambaForCausalLM"], "state_size": 16}, "state-space", "softmax attention"),
    "Jamba": ({"architectures": ["JambaForCausalLM"], "mamba_d_state": 16}, "state-space", "softmax attention"),
    "hybrid by layers": (
        {"architectures": ["NewForCausalLM"], "layer_types": ["linear_attention", "full_attention"]},
        "state-space",
        "softmax attention",
    ),
    "DeepSeek": (
        {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512},
        "multi-head latent attention already (kv_lora_rank is 512)",
        "needs no conversion",
    ),
    "our own": ({"architectures": ["MLAForCausalLM"], "model_type": "mla_convert"}, "already converted", "source"),
    "our own, exported": (
        {"architectures": ["DeepseekMLAForCausalLM"], "model_type": "deepseek_mla", "kv_lora_rank": 32},
        "already converted",
        "source",
    ),
}
METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "MXFP4",
    "hqq": "HQQ",
    "quip": "'quip'",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Llama whose tensors cannot be read."""

    def unreadable(*_: object) -> None:
        raise AssertionError("a weight was read")

    saved = save_source(tiny_llama(), tmp_path / "model")
    monkeypatch.setattr(reader.SafetensorsCheckpoint, "_read", unreadable)
    return saved


def refusal(folder: Path, **fields: object) -> MLAConvertError:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UnsupportedArchitectureError) as caught:
        open_source(str(folder))
    return caught.value


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_architecture_is_refused_for_what_it_is(folder: Path, kind: str) -> None:
    fields, message, remedy = ARCHITECTURES[kind]
    error = refusal(folder, **fields)
    assert message in error.message
    assert remedy in error.remedy
    assert fields["architectures"][0] in error.message


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_checkpoint_is_refused_by_its_method(folder: Path, method: str) -> None:
    error = refusal(folder, quantization_config={"quant_method": method})
    assert "quantised" in error.message
    assert METHODS[method] in error.message
    assert "unquantised checkpoint" in error.remedy


def test_old_bitsandbytes_configs_name_no_method(folder: Path) -> None:
    assert "bitsandbytes" in refusal(folder, quantization_config={"load_in_4bit": True}).message


@pytest.mark.parametrize(("file", "said"), [("quantize_config.json", "GPTQ"), ("quant_config.json", "AWQ")])
def test_files_that_quantisers_leave_are_seen(folder: Path, file: str, said: str) -> None:
    (folder / file).write_text("{}")
    assert said in refusal(folder).message


def test_the_family_counts_before_the_quantisation(folder: Path) -> None:
    error = refusal(folder, architectures=["MambaForCausalLM"], quantization_config={"quant_method": "gptq"})
    assert "state-space" in error.message


@pytest.mark.parametrize("with_config", [False, True])
def test_a_peft_adapter_names_its_base(folder: Path, with_config: bool) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base-model"}))
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    if not with_config:
        (folder / "config.json").unlink()
    with pytest.raises(SourceError) as caught:
        open_source(str(folder))
    assert "PEFT adapter of 'owner/base-model'" in caught.value.message
    assert "merge_and_unload" in caught.value.remedy


def test_a_model_beside_an_adapter_opens(tmp_path: Path) -> None:
    folder = save_source(tiny_llama(), tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    assert open_source(str(folder)).spec.family == "llama"


@pytest.mark.parametrize(
    ("architecture", "kin"),
    [
        ("Qwen2MoeForCausalLM", ("Qwen2ForCausalLM",)),
        ("PhiMoEForCausalLM", ("Phi3ForCausalLM",)),
        ("GPTJForCausalLM", ("GPT2LMHeadModel",)),
        ("ErnieForCausalLM", ()),
        ("X", ()),
    ],
)
def test_kin_is_known_by_the_beginning_of_the_name(architecture: str, kin: tuple[str, ...]) -> None:
    assert nearest(architecture, ("Qwen2ForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel")) == kin


@pytest.mark.parametrize(
    ("architecture", "message", "remedy"),
    [
        ("gemma2", "no source adapter for the GGUF architecture 'gemma2'", "safetensors checkpoint"),
        ("deepseek2", "latent attention already", "needs no conversion"),
        ("mamba", "state-space", "another kind"),
        ("t5", "encoder-decoder", "another kind"),
        ("bert", "an encoder", "another kind"),
        ("clip", "multimodal", "another kind"),
    ],
)
def test_a_gguf_architecture_is_refused_for_what_it_is(architecture: str, message: str, remedy: str) -> None:
    with pytest.raises(UnsupportedArchitectureError) as caught:
        refuse_gguf_architecture(architecture, "model.gguf", ("llama", "qwen2"))
    assert message in caught.value.message
    assert "model.gguf" in caught.value.message
    assert remedy in caught.value.remedy
    refuse_gguf_architecture("llama", "model.gguf", ("llama", "qwen2"))
