"""Sources whose weights are stored as float8 with scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mla_convert.cli import run
from mla_convert.errors import SourceError, UnsupportedArchitectureError
from mla_convert.sources import open_source
from mla_convert.sources.fp8_checkpoint import dequantised
from tests.tiny import save_source, save_tensors, tiny_llama

BLOCK = (48, 40)  # neither divides 64, 96 or 32: the last block of rows and of columns is a part of one
LARGEST = 448.0  # of float8_e4m3fn
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
SCHEMES = ("block", "channel", "tensor", "compressed channel", "compressed tensor", "compressed block")


def quantisable(name: str) -> bool:
    return name.endswith("_proj.weight")


def blocks_of(weight: Tensor, scheme: str) -> tuple[int, int]:
    kind = scheme.split()[-1]
    return {"block": BLOCK, "channel": (1, weight.shape[1]), "tensor": tuple(weight.shape)}[kind]


def quantised(weight: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """The weight as float8, and its scales, block by block."""
    height, width = blocks_of(weight, scheme)
    rows, columns = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
    stored, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            place = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scales[i, j] = weight[place].abs().max() / LARGEST
            stored[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
    return stored, scales


def fp8_source(folder: Path, scheme: str = "block", **fields: Any) -> tuple[Path, dict[str, Tensor]]:
    """A tiny Llama in float8, and by name what its weights stand for, in float32."""
    save_source(tiny_llama(dtype=torch.bfloat16), folder)
    compressed = scheme.startswith("compressed")
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not quantisable(name):
            stored[name], meant[name] = weight, weight.float()
            continue
        stored[name], scales = quantised(weight.float(), scheme)
        height, width = blocks_of(weight, scheme)
        whole = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[: weight.shape[0], : weight.shape[1]]
        meant[name] = stored[name].float() * whole
        if scheme.endswith("tensor"):
            scales = scales.reshape(1) if compressed else scales.reshape(())
        stored[name + ("_scale" if compressed else "_scale_inv")] = scales
    if compressed:
        stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        stored["model.layers.0.self_attn.q_proj.input_scale"] = torch.ones(1)
    save_tensors(stored, folder)
    quantisation: dict[str, Any] = {**FP8, "weight_block_size": list(BLOCK) if scheme == "block" else None}
    if compressed:
        kind = scheme.split()[-1]
        weights = {"type": "float", "num_bits": 8, "strategy": kind, "symmetric": True}
        weights["block_structure"] = list(BLOCK) if kind == "block" else None
        quantisation = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**quantisation, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, meant


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_read_as_what_they_stand_for(tmp_path: Path, scheme: str) -> None:
    folder, meant = fp8_source(tmp_path, scheme)
    source = open_source(str(folder))
    assert set(source.tensor_names()) == set(meant)
    assert source.spec.dtype == "bfloat16"
    for name, value in meant.items():
        read = source.tensor(name)
        assert read.dtype == torch.bfloat16
        # bfloat16 has 8 bits of precision, so that rounding to it is off by at most 2^-9
        torch.testing.assert_close(read.float(), value, rtol=2**-8, atol=0)


def test_the_product_by_hand() -> None:
    weight = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 4.0], [2.0, 0.25]])
    expected = [[0.5, 1.0, 12.0], [2.0, 2.5, 24.0], [14.0, 16.0, 2.25]]
    assert dequantised(weight, scale, (2, 2)).tolist() == expected
    assert dequantised(weight, torch.tensor([[1.0], [0.5], [2.0]]), None)[1].tolist() == [2.0, 2.5, 3.0]
    assert dequantised(weight, torch.tensor(2.0), (2, 2))[0].tolist() == [2.0, 4.0, 6.0]


def test_scales_that_are_powers_of_two_in_eight_bits(tmp_path: Path) -> None:
    folder, _ = fp8_source(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    exact = {
        name: torch.full_like(value, 2.0**-7).to(torch.float8_e8m0fnu) if name.endswith("_scale_inv") else value
        for name, value in tensors.items()
    }
    save_tensors(exact, folder)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(open_source(str(folder)).tensor(name).float(), tensors[name].float() / 128)


def test_transformers_model_holds_them_and_is_not_quantised(tmp_path: Path) -> None:
    folder, meant = fp8_source(tmp_path / "fp8")
    plain = tiny_llama()
    plain.load_state_dict({name: value.bfloat16().float() for name, value in meant.items()})
    source = open_source(str(folder))
    model = source.load_model(dtype=torch.float32)
    ids = torch.arange(2, 42)[None]
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert getattr(source.config, "quantization_config", None) is None
    assert source.load_tokenizer()("a").input_ids


def test_it_converts_into_a_folder_that_is_not_quantised(tmp_path: Path) -> None:
    folder, meant = fp8_source(tmp_path / "fp8")
    arguments = ["convert", str(folder), str(tmp_path / "mla"), "--cache", "1.0", "--recipe", "exact"]
    assert run([*arguments, "--dtype", "float32", "--quiet", "--json"]) == 0
    config = json.loads((tmp_path / "mla" / "config.json").read_text())
    assert "quantization_config" not in config
    plain = tiny_llama()
    plain.load_state_dict({name: value.bfloat16().float() for name, value in meant.items()})
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "mla")
    ids = torch.arange(2, 42)[None]
    # both in float32, whose products of other shapes round differently
    torch.testing.assert_close(converted(ids).logits, plain(ids).logits, atol=1e-3, rtol=0)


def edited(folder: Path, **changes: Tensor | None) -> Path:
    tensors = load_file(folder / "model.safetensors") | changes
    save_tensors({name: value for name, value in tensors.items() if value is not None}, folder)
    return folder


def test_a_weight_without_a_scale_is_named(tmp_path: Path) -> None:
    folder, _ = fp8_source(tmp_path)
    name = "model.layers.1.self_attn.o_proj.weight"
    with pytest.raises(UnsupportedArchitectureError, match=rf"'{name}' without a scale"):
        open_source(str(edited(folder, **{f"{name}_scale_inv": None})))


def test_scales_of_another_block_size_are_found_when_it_is_opened(tmp_path: Path) -> None:
    folder, _ = fp8_source(tmp_path, weight_block_size=[16, 16])
    with pytest.raises(SourceError, match="not one for each block of 16 by 16"):
        open_source(str(folder))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"config_groups": {"g": {"weights": {"type": "int", "num_bits": 4, "strategy": "group"}}}}, "4-bit int"),
        ({"config_groups": {"g": {"weights": {"type": "float", "num_bits": 8, "strategy": "group"}}}}, "scales by"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "rotated"),
    ],
)
def test_what_else_compressed_tensors_stores_is_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    folder, _ = fp8_source(tmp_path, "compressed channel", **fields)
    with pytest.raises(UnsupportedArchitectureError, match=said):
        open_source(str(folder))
