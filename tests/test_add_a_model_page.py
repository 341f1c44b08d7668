"""docs/add-a-model.md: the adapter that it shows is one, and converts its family exactly."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import Glm4Config, Glm4ForCausalLM

from mla_convert.export.reading import checked_decoder
from mla_convert.features import features
from mla_convert.sources import open_source, registry
from mla_convert.sources.adapter import DenseAdapter
from tests.tiny import save_source

PAGE = Path(__file__).parent.parent / "docs" / "add-a-model.md"
SIZES = {
    "vocab_size": 288,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> type[DenseAdapter]:
    """The page's adapter, run as the file that it would be, in the registry."""
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
    module = ModuleType("mla_convert.sources.glm4")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    shown = module.__dict__["Glm4Adapter"]
    monkeypatch.setattr(registry, "ADAPTERS", (*registry.ADAPTERS, shown))
    return shown


def test_it_reads_its_family_as_transformers_does(adapter: type[DenseAdapter], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Glm4ForCausalLM(Glm4Config(**SIZES)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * drawn if "norm" in name else 0.3 * drawn)
    source = open_source(str(save_source(model, tmp_path)))
    assert source.spec.family == adapter.family
    assert source.spec.rope.dim == 8
    assert features(source.spec) == (
        "8 of a head's 16 dims rotate",
        "what attention and feed-forward block add is normalised",
        "there are biases on queries, keys, values",
    )
    # the bar that every conversion is held to; a norm, bias or pair out of place is off by more than 0.1
    assert checked_decoder(source, torch.randint(2, 288, (1, 40))).difference < 1e-4


def test_every_hook_that_it_lists_is_one() -> None:
    table = PAGE.read_text("utf-8").split("| hook | says |")[1].split("\n\n")[0]
    hooks = re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines() if line.count("|") == 3))
    assert len(hooks) > 10
    assert all(hasattr(DenseAdapter, hook) for hook in hooks)
