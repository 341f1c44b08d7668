"""What a checkpoint's tensors are checked for when they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mla_convert.errors import SourceError
from mla_convert.sources import open_source
from mla_convert.sources.checkpoint import Stamp, check_finite
from tests.tiny import tiny_llama


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, number: float) -> None:
    """In vectors of the processor's width, in the rest after them, and in what another thread looks at."""
    tensor = torch.randn(1003, 101, generator=torch.Generator().manual_seed(0)).to(dtype)
    check_finite("w", tensor, "model")
    for place in (0, 1, 7, 500, 50_000, 70_001, tensor.numel() - 2, tensor.numel() - 1):
        spoilt = tensor.clone()
        spoilt.view(-1)[place] = number
        with pytest.raises(SourceError, match="'w' of model holds numbers"):
            check_finite("w", spoilt, "model")


def test_the_largest_numbers_and_no_numbers_are_finite() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        limits = torch.finfo(dtype)
        check_finite("w", torch.tensor([limits.max, limits.min, limits.tiny, 0.0], dtype=dtype), "model")
    check_finite("w", torch.zeros(0, 3), "model")


def test_a_stamp_tells_a_changed_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"1234")
    stamp = Stamp.of(file)
    stamp.check(file)
    os.utime(file, ns=(0, stamp.written + 10**9))
    with pytest.raises(SourceError, match="changed while it was read"):
        stamp.check(file)
    os.utime(file, ns=(0, stamp.written))
    stamp.check(file)
    os.truncate(file, 3)
    os.utime(file, ns=(0, stamp.written))
    with pytest.raises(SourceError, match="changed"):
        stamp.check(file)
    file.unlink()
    with pytest.raises(SourceError, match="gone"):
        stamp.check(file)


def test_a_gguf_file_that_was_cut_short_is_not_read(tmp_path: Path) -> None:
    """It is mapped: reading what is no longer there would end the process."""
    pytest.importorskip("gguf")
    from tests.sources.gguf_files import write_gguf

    file = write_gguf(tiny_llama(), tmp_path / "model.gguf")
    source = open_source(str(file))
    source.tensor("model.norm.weight")
    os.truncate(file, 4096)
    with pytest.raises(SourceError, match="changed while it was read"):
        source.attention(1)
