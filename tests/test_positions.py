"""A context that a model's table of positions does not hold is an error that says so, not an IndexError."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_convert.errors import UsageError
from mla_convert.evaluate import compare, perplexity
from mla_convert.heal.healing import HealRequest, heal
from mla_convert.pipeline import ConvertRequest, convert
from tests.tiny import save_source, tiny_llama
from tests.tiny_families import tiny_gpt2, tiny_mpt


@pytest.mark.parametrize("build", [lambda: tiny_gpt2(n_positions=16), lambda: tiny_mpt(max_seq_len=16)], ids=["2", "m"])
def test_evaluation_needs_a_position_for_each_token(build) -> None:
    model = build()
    fits, long = (torch.randint(2, 288, (1, tokens), generator=torch.Generator().manual_seed(0)) for tokens in (16, 17))
    perplexity(model, fits)
    with pytest.raises(UsageError, match="17 tokens is longer than the 16 positions"):
        perplexity(model, long)
    with pytest.raises(UsageError, match="17 tokens is longer than the 16 positions"):
        compare(tiny_llama(), model, long)


def test_rope_has_no_end() -> None:
    perplexity(tiny_llama(max_position_embeddings=16), torch.full((1, 17), 5))


def test_healing_needs_a_position_for_each_token(tmp_path: Path) -> None:
    source = save_source(tiny_gpt2(n_positions=64), tmp_path / "source")
    model = tmp_path / "model"
    convert(ConvertRequest(source=str(source), out=model, recipe="exact"))
    request = HealRequest(model=model, teacher=str(source), texts=("builtin:pydoc",), out=tmp_path / "healed")
    with pytest.raises(UsageError, match="512 tokens is longer than the 64 positions"):
        heal(request)
