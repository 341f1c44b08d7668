from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources import open_source
from tests.sources.conformance import AdapterConformance
from tests.tiny import save_source, tiny_mistral


class TestMistral(AdapterConformance):
    variants: ClassVar = {
        "GQA": lambda: tiny_mistral("GQA"),
        "MHA-tied": lambda: tiny_mistral("MHA", tied=True),
        "MQA-window": lambda: tiny_mistral("MQA", window=8),
        "head-dim": lambda: tiny_mistral(head_dim=32),
        "dynamic-window": lambda: tiny_mistral(
            window=8,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
            max_position_embeddings=16,
        ),
        "bfloat16": lambda: tiny_mistral(dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("window", [None, 8])
def test_the_window_holds_for_every_layer(tmp_path: Path, window: int | None) -> None:
    assert open_source(str(save_source(tiny_mistral(window=window), tmp_path))).spec.windows == (window, window)


def test_mixed_layer_types_are_refused(tmp_path: Path) -> None:
    folder = save_source(tiny_mistral(window=8), tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    fields["layer_types"] = ["full_attention", "sliding_attention"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedArchitectureError, match="layer_types"):
        open_source(str(folder))
