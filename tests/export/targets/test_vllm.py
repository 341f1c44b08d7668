"""The vLLM target: its own class where that is exact and served, else the exported one, always with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_convert.export.converted import ConvertedModel
from mla_convert.export.reload import reload_logits, verify_folder
from mla_convert.export.targets.target import ExportOptions, ExportPlan
from mla_convert.export.targets.vllm import VLLM
from mla_convert.progress import silent
from tests.mla.exported import saved
from tests.mla.native import LAYERS, native, tokens

# Powers of 10000^(-1/16): places 0, 3 and 7, then others in other layers, as a choice of slots per layer leaves them.
PLACES = [[0, 3, 7], [1, 2, 9], [0, 1, 11]]
ONE_BASE: dict[str, Any] = {"rope_inv_freq": [[10000.0 ** (-place / 16) for place in row] for row in PLACES]}
OPTIONS = ExportOptions()


def answers(model: ConvertedModel) -> torch.Tensor:
    return reload_logits(model.folder, tokens())


def written(model: ConvertedModel, plan: ExportPlan, folder: Path, options: ExportOptions = OPTIONS) -> dict[str, Any]:
    """Write what is planned, check that transformers answers as the model, and return the config."""
    folder.mkdir()
    VLLM.write(model, plan, options, folder, silent)
    config = json.loads((folder / "config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (plan.kv_rank, plan.rope_dim)
    assert config["model_type"] == ("deepseek_v3" if plan.form == "stock" else "deepseek_mla")
    verify_folder(folder, tokens(), answers(model), tolerance=1e-4)
    return config


def test_slots_at_one_base_are_written_stock(tmp_path: Path) -> None:
    model = saved(native(**ONE_BASE), tmp_path / "native")
    plan = VLLM.plan(model, OPTIONS)
    assert (plan.form, plan.exact, plan.reasons) == ("stock", True, ())
    assert (plan.kv_rank, plan.rope_dim) == (256, 64)
    assert plan.cache_bytes == LAYERS * 320 * 4
    config = written(model, plan, tmp_path / "out")
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert "auto_map" not in config
    # the fault of vLLM's default RoPE on CPUs is not met: YaRN by a factor of one is the same function
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["rope_parameters"]["factor"] == 1.0
    step = config["rope_parameters"]["rope_theta"] ** (-2 / 64)
    assert step == pytest.approx(10000.0 ** (-1 / 16), rel=1e-6)


def test_the_smallest_stock_shape_can_be_asked_for(tmp_path: Path) -> None:
    model = saved(native(**ONE_BASE), tmp_path / "native")
    options = ExportOptions(kv_rank=10, form="stock")
    plan = VLLM.plan(model, options)
    assert (plan.kv_rank, plan.rope_dim) == (10, 24)  # places 0 to 11
    assert any("refuses to cache latents of 34" in note for note in plan.notes)
    # VLLM_MLA_DISABLE=1: keys and padded values of 4 heads of 8 + 24 dims, in 3 layers of float32
    assert any(f"{2 * 4 * (8 + 24) * 3 * 4} bytes a token" in note for note in plan.notes)
    written(model, plan, tmp_path / "out", options)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"query_bias": True}, "some on queries"),
        ({"latent_bias": True}, "some on the latent"),
        ({"output_bias": True}, "some on the attention's output"),
        ({"mlp_bias": True}, "some on the feed-forward layers"),
        ({"hidden_act": "gelu"}, "compute SiLU, the model gelu"),
        ({"rope_inv_freq": [[1.0, 0.5, 0.5], *ONE_BASE["rope_inv_freq"][1:]]}, "not powers of one number"),
        ({"rope_inv_freq": [[1.0, 0.5, 0.5]] * 3}, "several RoPE slots at one frequency"),
    ],
)
def test_what_the_stock_class_lacks_is_written_custom(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    model = saved(native(**{**ONE_BASE, **changes}), tmp_path / "native")
    refused = VLLM.plan(model, ExportOptions(form="stock"))
    assert refused.form is None
    plan = VLLM.plan(model, OPTIONS)
    assert (plan.form, plan.exact, plan.kv_rank, plan.rope_dim) == ("custom", True, 256, 64)
    for one in (plan, refused):
        assert len(one.reasons) == 1
        assert said in one.reasons[0]
    config = written(model, plan, tmp_path / "out")
    assert config["architectures"] == ["DeepseekMLAForCausalLM"]
    assert config["head_dim"] == 320  # by which vLLM knows what is cached of a model type that it does not know


def test_a_base_that_takes_more_slots_than_vllm_serves_is_written_custom(tmp_path: Path) -> None:
    """Llama's low frequencies: place 40 of a base needs R = 82, where three slots of any frequency need 6."""
    frequencies = [[500000.0 ** (-place / 64) for place in row] for row in [[0, 1, 40], [0, 1, 2], [1, 2, 3]]]
    model = saved(native(rope_inv_freq=frequencies), tmp_path / "native")
    plan = VLLM.plan(model, OPTIONS)
    assert (plan.form, plan.kv_rank, plan.rope_dim) == ("custom", 256, 64)
    assert "R = 82" in plan.reasons[0]
    forced = VLLM.plan(model, ExportOptions(form="stock"))
    assert (forced.form, forced.rope_dim) == ("stock", 82)
    written(model, forced, tmp_path / "out", ExportOptions(form="stock"))


def test_float16_is_custom_only(tmp_path: Path) -> None:
    model = saved(native(**ONE_BASE), tmp_path / "native")
    plan = VLLM.plan(model, ExportOptions(dtype="float16"))
    assert plan.form == "custom"
    assert "float16 cannot hold" in plan.reasons[0]
    assert VLLM.plan(model, ExportOptions(dtype="float16", form="stock")).form is None


@pytest.mark.parametrize("form", ["stock", "custom"])
def test_a_window_ends_the_context(tmp_path: Path, form: Any) -> None:
    model = saved(native("windows", **ONE_BASE), tmp_path / "native")
    options = ExportOptions(form=form)
    plan = VLLM.plan(model, options)
    assert any("5 tokens instead of 128" in note for note in plan.notes)
    (tmp_path / "out").mkdir()
    VLLM.write(model, plan, options, tmp_path / "out", silent)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 5
    assert config.get("sliding_window") is None
    within = tokens()[:, :5]
    verify_folder(tmp_path / "out", within, reload_logits(model.folder, within), tolerance=1e-4)


def test_latents_wider_than_vllm_serves_say_so(tmp_path: Path) -> None:
    model = saved(native(kv_lora_rank=600), tmp_path / "native")
    plan = VLLM.plan(model, OPTIONS)
    assert (plan.form, plan.kv_rank, plan.rope_dim) == ("custom", 600, 6)
    assert any("VLLM_MLA_DISABLE=1" in note for note in plan.notes)
    cpu = VLLM.plan(model, ExportOptions(kv_rank=512))
    assert cpu.form is None


def test_the_shape_for_cpus_can_be_asked_for(tmp_path: Path) -> None:
    model = saved(native(), tmp_path / "native")
    plan = VLLM.plan(model, ExportOptions(kv_rank=512, rope_dim=64, dtype="bfloat16"))
    assert (plan.kv_rank, plan.rope_dim, plan.cache_bytes) == (512, 64, LAYERS * 576 * 2)
    assert not any("VLLM_MLA_DISABLE" in note for note in plan.notes)


def test_no_other_form_is_known(tmp_path: Path) -> None:
    assert VLLM.plan(saved(native(), tmp_path / "native"), ExportOptions(form="gguf")).form is None
