"""Verification finds what is wrong with a folder: wrong numbers, missing tensors, broken files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_convert.errors import VerificationError
from mla_convert.export.native import write_native
from mla_convert.export.reload import compare_logits, reload_logits, verify_folder
from mla_convert.sources import open_source
from tests.export.exact import exact_layers, exact_shape
from tests.export.test_native import prompt, source_logits
from tests.tiny import save_source, tiny_llama


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    model = tiny_llama()
    source = open_source(str(save_source(model, tmp_path / "source")))
    (tmp_path / "out").mkdir()
    write_native(source, exact_layers(source), exact_shape(source.spec), tmp_path / "out", dtype=torch.float32)
    return tmp_path / "out", source_logits(model, prompt())


def _edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the single shard, or with None remove them; names have __ for dots."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_right_folder_passes(converted: tuple[Path, torch.Tensor]) -> None:
    folder, reference = converted
    check = verify_folder(folder, prompt(), reference, tolerance=1e-4)
    assert check.max_logit_difference <= 1e-4
    assert check.top1_agreement == 1.0
    assert check.tokens == prompt().numel()


def test_a_wrong_number_is_found(converted: tuple[Path, torch.Tensor]) -> None:
    folder, reference = converted
    _edit(folder, model__norm__weight=torch.full((64,), 1.1))
    with pytest.raises(VerificationError, match="differ by up to"):
        verify_folder(folder, prompt(), reference, tolerance=1e-4)


@pytest.mark.parametrize("fresh_process", [False, True])
def test_a_missing_tensor_is_found(converted: tuple[Path, torch.Tensor], fresh_process: bool) -> None:
    folder, _ = converted
    _edit(folder, model__layers__1__self_attn__kv_b_proj__weight=None)
    with pytest.raises(VerificationError, match=r"missing keys: model\.layers\.1\.self_attn\.kv_b_proj\.weight"):
        reload_logits(folder, prompt(), fresh_process=fresh_process)


def test_a_tensor_left_over_is_found(converted: tuple[Path, torch.Tensor]) -> None:
    folder, _ = converted
    _edit(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(192))
    with pytest.raises(VerificationError, match="unexpected keys"):
        reload_logits(folder, prompt())


def test_a_tensor_of_another_shape_is_found(converted: tuple[Path, torch.Tensor]) -> None:
    folder, _ = converted
    _edit(folder, model__norm__weight=torch.ones(63))
    with pytest.raises(VerificationError):
        reload_logits(folder, prompt())


def test_a_truncated_file_is_found(converted: tuple[Path, torch.Tensor]) -> None:
    folder, _ = converted
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(VerificationError, match="does not load"):
        reload_logits(folder, prompt())


def test_a_folder_without_config_is_found(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"config\.json"):
        reload_logits(tmp_path, prompt())


def test_logits_that_are_not_finite_or_not_as_many_are_found() -> None:
    reference = torch.zeros(1, 2, 3)
    with pytest.raises(VerificationError, match="not finite"):
        compare_logits(torch.full((1, 2, 3), math.nan), reference)
    with pytest.raises(VerificationError, match="shape"):
        compare_logits(torch.zeros(1, 2, 4), reference)


def test_the_differences_are_those_of_the_definition() -> None:
    reference = torch.tensor([[[0.0, 1.0], [2.0, 0.0]]])
    found = torch.tensor([[[3.0, 1.0], [2.0, 0.0]]])
    check = compare_logits(found, reference)
    assert check.max_logit_difference == 3.0
    # log softmax of (0, 1) and (3, 1): -1.3133, -0.3133 and -0.1269, -2.1269
    assert check.max_logprob_difference == pytest.approx(2.1269 - 0.3133, abs=1e-3)
    assert check.top1_agreement == 0.5
