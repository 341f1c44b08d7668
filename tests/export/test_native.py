"""The native folder: exact weights give the source's logits back, with nothing of this package to import."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from mla_convert.errors import FormatError
from mla_convert.export.native import write_native
from mla_convert.export.reload import compare_logits, reload_logits, verify_folder
from mla_convert.mla import MLAWeights
from mla_convert.sources import Source, open_source
from mla_convert.spec import MLAShape
from tests.export.exact import converted_layers, exact_layers, exact_shape
from tests.tiny import VOCAB_SIZE, save_source, tiny_gemma2, tiny_gemma3, tiny_llama, tiny_mistral, tiny_qwen2
from tests.tiny_families import tiny_bloom, tiny_qwen2_moe

FAMILIES = {
    "llama-mha": lambda: tiny_llama("MHA"),
    "llama-gqa": lambda: tiny_llama("GQA"),
    "llama-mqa": lambda: tiny_llama("MQA"),
    "llama-tied": lambda: tiny_llama(tied=True),
    "llama-bias": lambda: tiny_llama(bias=True),
    "llama-mlp-bias": lambda: tiny_llama(mlp_bias=True),
    "llama3": lambda: tiny_llama(llama3=True),
    "mistral-window": lambda: tiny_mistral(window=8),
    "qwen2": lambda: tiny_qwen2(),
    "qwen2-window": lambda: tiny_qwen2(window=8),
}


def prompt(length: int = 40) -> torch.Tensor:
    return torch.randint(2, VOCAB_SIZE, (2, length), generator=torch.Generator().manual_seed(1))


def source_logits(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids, use_cache=False).logits


def written(source: Source, folder: Path, **options: object) -> Path:
    folder.mkdir()
    arguments = {
        "layers": exact_layers(source),
        "shape": exact_shape(source.spec),
        "dtype": torch.float32,
        **options,
    }
    write_native(source, folder=folder, **arguments)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_weights_give_the_sources_logits(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family]()
    source = open_source(str(save_source(model, tmp_path / "source")))
    folder = written(source, tmp_path / "out")
    check = compare_logits(reload_logits(folder, prompt()), source_logits(model, prompt()))
    # float32 rounding through two layers of logits of size ten; any misplaced row is off by more than 0.1
    assert check.max_logit_difference <= 1e-4
    assert check.top1_agreement == 1.0


def test_the_folder_loads_where_the_package_cannot_be_imported(tmp_path: Path) -> None:
    model = tiny_qwen2()
    source = open_source(str(save_source(model, tmp_path / "source")))
    folder = written(source, tmp_path / "out", max_shard_size="20KB")
    check = verify_folder(folder, prompt(), source_logits(model, prompt()), tolerance=1e-4, fresh_process=True)
    assert check.tokens == 80


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 24,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + pair for pair in range(8)],
}
# What no Llama has, all of it: capped scores, windows, four norms a layer, norms of queries and keys, experts, ALiBi.
OTHERS = {
    "gemma2": tiny_gemma2,
    "gemma3": tiny_gemma3,
    "qwen2-moe": tiny_qwen2_moe,
    "bloom": tiny_bloom,
    "longrope": lambda: tiny_llama(rope_parameters=LONGROPE),
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_decoders_load_where_the_package_cannot_be_imported(tmp_path: Path, family: str) -> None:
    model = OTHERS[family]()
    source = open_source(str(save_source(model, tmp_path / "source")))
    layers, shape = converted_layers(source)
    folder = tmp_path / "out"
    folder.mkdir()
    write_native(source, layers, shape, folder, dtype=torch.float32)
    # float32 rounding; anything of the model left out is off by more than 0.01
    verify_folder(folder, prompt(), source_logits(model, prompt()), tolerance=2e-4, fresh_process=True)


def test_the_config_says_how_frequencies_change(tmp_path: Path) -> None:
    model = tiny_llama(rope_parameters=LONGROPE)
    source = open_source(str(save_source(model, tmp_path / "source")))
    layers, shape = converted_layers(source)
    config = json.loads((written(source, tmp_path / "out", layers=layers, shape=shape) / "config.json").read_text())
    assert config["rope_update"]["kind"] == "longrope"
    assert config["rope_update"]["original_positions"] == 24
    base = [10000.0 ** (-2 * pair / 16) for pair in range(8)]
    assert config["rope_update"]["inv_freq"] == pytest.approx([base[pair] / (1.0 + pair) for pair in range(8)])
    for pairs, frequencies in zip(config["rope_pairs"], config["rope_inv_freq"], strict=True):
        assert sorted(pairs) == sorted([*range(8)] * 2)
        assert frequencies == pytest.approx([base[pair] for pair in pairs])
    for length in (20, 40):
        logits = reload_logits(tmp_path / "out", prompt(length))
        assert compare_logits(logits, source_logits(model, prompt(length))).max_logit_difference <= 1e-4
    nameless = [(i, replace(weights, pairs=None)) for i, weights in layers]
    with pytest.raises(ValueError, match="which pairs the slots turn as"):
        written(source, tmp_path / "again", layers=nameless, shape=shape)


def test_the_config_names_the_class_and_its_files(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_llama(), tmp_path / "source")))
    folder = written(source, tmp_path / "out", dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["MLAForCausalLM"]
    assert config["dtype"] == "bfloat16"
    for reference in config["auto_map"].values():
        module, name = reference.split(".")
        assert f"class {name}" in (folder / f"{module}.py").read_text()
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_tokenizer_chat_template_and_generation_config_come_along(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_llama(), tmp_path / "source")))
    names = {path.name for path in written(source, tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names
    assert "chat_template.jinja" in names


def test_a_tied_head_is_not_written_twice(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_llama(tied=True), tmp_path / "source")))
    with safe_open(written(source, tmp_path / "out") / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_no_more_than_one_layer_is_held_and_shards_keep_their_size(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_llama(num_hidden_layers=6), tmp_path / "source")))
    alive: list[weakref.ref[MLAWeights]] = []
    most_alive = 0

    def counted() -> Iterator[tuple[int, MLAWeights]]:
        nonlocal most_alive
        for i in range(source.spec.num_layers):
            most_alive = max(most_alive, sum(reference() is not None for reference in alive))
            _, weights = next(layer for layer in exact_layers(source) if layer[0] == i)
            alive.append(weakref.ref(weights))
            yield i, weights
            del weights

    folder = tmp_path / "out"
    folder.mkdir()
    write_native(source, counted(), exact_shape(source.spec), folder, dtype=torch.float32, max_shard_size="80KB")
    assert most_alive == 0  # of those handed over, when the next one is made
    sizes = [sum(tensor.nbytes for tensor in load_file(shard).values()) for shard in folder.glob("*.safetensors")]
    assert max(sizes) <= 80_000
    assert len(sizes) > 3


def test_progress_counts_layers(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_llama(), tmp_path / "source")))
    calls: list[tuple[str, int, int]] = []
    written(source, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert calls == [("write", 1, 2), ("write", 2, 2)]


def test_a_missing_layer_is_refused(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_llama(), tmp_path / "source")))
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(ValueError, match="expected 0 to 1"):
        write_native(source, [next(exact_layers(source))], exact_shape(source.spec), folder, dtype=torch.float32)


def test_windows_of_two_lengths_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_mistral(window=8), tmp_path / "source")))
    source.spec = replace(source.spec, windows=(8, 16))
    with pytest.raises(FormatError, match=r"\[8, 16\]"):
        written(source, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def with_spare_channels(weights: MLAWeights, rank: int) -> MLAWeights:
    """The same layer with `rank` channels of the latent, the further ones zero."""
    more = rank - weights.w_dkv.shape[0]
    pad = torch.nn.functional.pad
    return replace(
        weights,
        w_dkv=pad(weights.w_dkv, (0, 0, 0, more)),
        w_uk=pad(weights.w_uk, (0, more)),
        w_uv=pad(weights.w_uv, (0, more)),
        b_dkv=None if weights.b_dkv is None else pad(weights.b_dkv, (0, more)),
    )


def test_layers_of_different_sizes_are_listed_and_load_where_the_package_cannot_be_imported(tmp_path: Path) -> None:
    model = tiny_qwen2()
    source = open_source(str(save_source(model, tmp_path / "source")))
    layers = [(i, with_spare_channels(weights, weights.w_dkv.shape[0] + 8 * i)) for i, weights in exact_layers(source)]
    shapes = [weights.shape for _, weights in layers]
    folder = tmp_path / "out"
    folder.mkdir()
    write_native(source, layers, shapes, folder, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    assert config["kv_lora_ranks"] == [shape.kv_rank for shape in shapes]
    assert config["kv_lora_ranks"][1] == config["kv_lora_ranks"][0] + 8 == config["kv_lora_rank"]
    assert config["qk_rope_head_dims"] == [config["qk_rope_head_dim"]] * 2
    verify_folder(folder, prompt(), source_logits(model, prompt()), tolerance=1e-4, fresh_process=True)


def test_shapes_that_do_not_fit_the_layers_are_refused(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_llama(), tmp_path / "source")))
    shape = exact_shape(source.spec)
    wrong: list[tuple[list[MLAShape], str]] = [
        ([shape], "1 shapes for 2 layers"),
        ([shape, replace(shape, kv_rank=shape.kv_rank - 1)], "layer 1 has shape"),
    ]
    for i, (shapes, said) in enumerate(wrong):
        folder = tmp_path / str(i)
        folder.mkdir()
        with pytest.raises(ValueError, match=said):
            write_native(source, exact_layers(source), shapes, folder, dtype=torch.float32)
