"""The SGLang target: the stock class with plain RoPE, or a refusal with the reasons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from mla_convert.export.reload import reload_logits, verify_folder
from mla_convert.export.targets.sglang import SGLANG
from mla_convert.export.targets.target import ExportOptions
from mla_convert.progress import silent
from tests.export.targets.test_vllm import ONE_BASE
from tests.mla.exported import saved
from tests.mla.native import LAYERS, native, tokens


@pytest.mark.parametrize("options", [ExportOptions(), ExportOptions(kv_rank=512, rope_dim=64)])
def test_it_is_stock_and_answers_as_the_model(tmp_path: Path, options: ExportOptions) -> None:
    model = saved(native(**ONE_BASE), tmp_path / "native")
    plan = SGLANG.plan(model, options)
    assert (plan.form, plan.engine) == ("stock", "transformers")
    assert (plan.kv_rank, plan.rope_dim) == (options.kv_rank or 10, options.rope_dim or 24)
    assert plan.cache_bytes == LAYERS * (plan.kv_rank + plan.rope_dim) * 4
    assert any("not run" in note for note in plan.notes)
    (tmp_path / "out").mkdir()
    SGLANG.write(model, plan, options, tmp_path / "out", silent)
    verify_folder(tmp_path / "out", tokens(), reload_logits(model.folder, tokens()), tolerance=1e-4, fresh_process=True)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["architectures"] == ["DeepseekV3ForCausalLM"]
    # said twice: SGLang takes 10000 where it finds the base in neither place
    assert fields["rope_theta"] == fields["rope_parameters"]["rope_theta"]
    assert fields["rope_theta"] == pytest.approx(10000.0 ** (plan.rope_dim / 32), rel=1e-5)
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters["rope_type"] == "default"


def test_what_it_cannot_hold_is_refused_with_every_reason(tmp_path: Path) -> None:
    plan = SGLANG.plan(saved(native("biases"), tmp_path / "native"), ExportOptions(form="custom", dtype="float16"))
    assert plan.form is None
    for said in ("biases", "float16", "not powers of one number", "no form 'custom'"):
        assert any(said in reason for reason in plan.reasons), said
