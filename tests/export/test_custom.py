"""The exported class as a folder: every family's answers, layers of unequal sizes, float16, and what breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_convert.export.converted import ConvertedModel, open_converted
from mla_convert.export.custom import custom_layer, write_custom
from mla_convert.export.deepseek_layer import interleaved
from mla_convert.export.native import write_native
from mla_convert.export.reload import ReloadCheck, compare_logits, reload_logits
from mla_convert.sources import open_source
from tests.export.exact import exact_layers, exact_shape
from tests.export.test_native import FAMILIES, prompt, source_logits
from tests.mla.exported import saved, written
from tests.mla.native import native, tokens
from tests.tiny import save_source, tiny_llama


def converted(family: str, folder: Path) -> tuple[ConvertedModel, Tensor]:
    """An exact native model of the family, and the source's own logits on the prompt."""
    model = FAMILIES[family]()
    source = open_source(str(save_source(model, folder / "source")))
    (folder / "native").mkdir()
    write_native(source, exact_layers(source), exact_shape(source.spec), folder / "native", dtype=torch.float32)
    return open_converted(folder / "native"), source_logits(model, prompt())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_as_its_source(tmp_path: Path, family: str) -> None:
    model, expected = converted(family, tmp_path)
    for served in (False, True):
        folder = tmp_path / f"served-{served}"
        folder.mkdir()
        write_custom(model, 80, 72, folder, dtype=torch.float32, served=served, max_shard_size="60KB")
        # a served folder's context ends where a window begins to hide
        seen = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
        assert seen == (8 if served and "window" in family else 256)
        check = compare_logits(reload_logits(folder, prompt()[:, :seen]), expected[:, :seen])
        # float32 rounding through two layers of logits of size ten; any misplaced row is off by more than 0.1
        assert check.max_logprob_difference <= 1e-4
        assert check.top1_agreement == 1.0


def test_weights_are_those_of_the_native_folder_to_the_last_bit(tmp_path: Path) -> None:
    before = saved(native("unequal").to(torch.bfloat16), tmp_path / "native")
    (tmp_path / "out").mkdir()
    write_custom(before, 24, 8, tmp_path / "out", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for i in range(before.spec.num_layers):
        rank, rope = before.shapes[i].kv_rank, before.shapes[i].rope_dim
        weights = before.layer(i)
        latent = tensors[f"model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight"]
        assert torch.equal(latent[:rank], weights.w_dkv)
        assert not latent[rank:24].any()
        assert latent[24:].count_nonzero(dim=1).count_nonzero() == rope
        assert torch.equal(tensors[f"model.layers.{i}.self_attn.o_proj.weight"], weights.w_o.flatten(1))
        up = tensors[f"model.layers.{i}.self_attn.kv_b_proj.weight"]
        assert torch.equal(up[:, :rank], torch.cat((weights.w_uk, weights.w_uv), dim=1).flatten(0, 1))


def test_layers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    layer = saved(native(), tmp_path).layer(0)
    norm = torch.ones(layer.w_dkv.shape[1])
    with pytest.raises(ValueError, match="latent of 10 does not fit into 9"):
        custom_layer(layer, 9, 6, torch.float32, norm)
    with pytest.raises(ValueError, match="RoPE key of 6 does not fit into 4"):
        custom_layer(layer, 10, 4, torch.float32, norm)


@pytest.mark.parametrize("size", [1.0, 300.0, 1 / 300])
def test_float16_costs_what_float16_costs(tmp_path: Path, size: float) -> None:
    """Whatever the latent's size: it is scaled to where the norm is a factor and nothing underflows."""
    model = native("latent-bias")
    with torch.no_grad():
        for layer in model.model.layers:
            attention, rank = layer.self_attn, model.config.kv_lora_rank
            attention.kv_a_proj_with_mqa.weight[:rank] *= size
            attention.kv_a_proj_with_mqa.bias[:rank] *= size
            attention.kv_b_proj.weight /= size
        expected = model(tokens(), use_cache=False).logits
        folder = written(model, tmp_path, dtype=torch.float16)
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
        mine = compare_logits(reload_logits(folder, tokens()), expected)
        computed = compare_logits(reload_logits(folder, tokens(), dtype=torch.float16), expected)
        rounded = native("latent-bias")
        for parameter in rounded.parameters():
            parameter.copy_(parameter.half().float())
        theirs = compare_logits(rounded(tokens(), use_cache=False).logits, expected)
    assert 0 < theirs.max_logprob_difference < 0.01
    assert mine.max_logprob_difference <= 1.5 * theirs.max_logprob_difference
    assert computed.max_logprob_difference <= 5 * theirs.max_logprob_difference


def swap_rope_layout(tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    config["rope_interleave"] = True


def swap_rope_rows(tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    rank, rope = int(str(config["kv_lora_rank"])), int(str(config["qk_rope_head_dim"]))
    for name, tensor in tensors.items():
        if "kv_a_proj_with_mqa" in name:
            tensor[rank:] = tensor[rank:][interleaved(rope)]


def drop_query_bias(tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    config["query_bias"] = False
    for name in [name for name in tensors if "q_proj.bias" in name]:
        del tensors[name]


def use_deepseeks_eps(tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    config["latent_norm_eps"] = 1e-6
    for name, tensor in tensors.items():
        if "kv_a_layernorm" in name:
            tensor.fill_(1.0)


def use_deepseeks_scale(tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    config["attention_scale"] = None


def use_the_first_layers_slots(tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    rows = config["rope_inv_freq"]
    assert isinstance(rows, list)
    config["rope_inv_freq"] = rows[:1] * len(rows)


@pytest.mark.parametrize(
    "breaking",
    [
        swap_rope_layout,
        swap_rope_rows,
        drop_query_bias,
        use_deepseeks_eps,
        use_deepseeks_scale,
        use_the_first_layers_slots,
    ],
)
def test_a_broken_folder_answers_far_from_the_model(
    tmp_path: Path, breaking: Callable[[dict[str, Tensor], dict[str, object]], None]
) -> None:
    model = native("biases")
    folder = written(model, tmp_path)
    with torch.no_grad():
        expected = model(tokens(), use_cache=False).logits

    def check() -> ReloadCheck:
        return compare_logits(reload_logits(folder, tokens()), expected)

    assert check().max_logprob_difference <= 1e-5
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    breaking(tensors, config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    assert check().max_logprob_difference >= 0.05  # the tolerance of exports is 1e-4


def test_companions_and_code_come_along(tmp_path: Path) -> None:
    source = open_source(str(save_source(tiny_llama(tied=True), tmp_path / "source")))
    (tmp_path / "native").mkdir()
    write_native(source, exact_layers(source), exact_shape(source.spec), tmp_path / "native", dtype=torch.float32)
    (tmp_path / "out").mkdir()
    seen: list[tuple[str, int, int]] = []
    model = open_converted(tmp_path / "native")
    write_custom(model, 32, 32, tmp_path / "out", dtype=torch.float32, progress=lambda *at: seen.append(at))
    assert seen == [("write", 1, 2), ("write", 2, 2)]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "generation_config.json", "chat_template.jinja", "model.safetensors"} <= names
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for reference in config["auto_map"].values():
        module, name = reference.split(".")
        assert f"class {name}" in (tmp_path / "out" / f"{module}.py").read_text()
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
