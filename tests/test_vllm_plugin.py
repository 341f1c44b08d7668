"""vLLM's plugin, with a stand-in for vLLM's registry: found by its entry point, and called as often as vLLM likes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoModel

from mla_convert.mla import DeepseekMLAConfig, DeepseekMLAModel


class Registry:
    """Refuses what vLLM warns of: a name that is registered twice."""

    def __init__(self) -> None:
        self.models: dict[str, str] = {}

    def get_supported_archs(self) -> list[str]:
        return list(self.models)

    def register_model(self, name: str, where: str) -> None:
        assert name not in self.models
        self.models[name] = where


def test_the_entry_point_registers_the_exported_class(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    [(name, value)] = project["entry-points"]["vllm.general_plugins"].items()
    registry = Registry()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    register = EntryPoint(name, value, "vllm.general_plugins").load()
    register()
    register()
    [(architecture, where)] = registry.models.items()
    assert architecture == "DeepseekMLAForCausalLM"
    assert where.startswith("vllm.model_executor.models.transformers:Transformers")
    # vLLM's backend builds what transformers knows for the config, so that has to be the exported class
    config = AutoConfig.for_model("deepseek_mla")
    assert type(config) is DeepseekMLAConfig
    assert AutoModel._model_mapping[type(config)] is DeepseekMLAModel


def test_it_costs_nothing_before_it_is_called() -> None:
    code = "import sys, mla_convert.serving.vllm_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
