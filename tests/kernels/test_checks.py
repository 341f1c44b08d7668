"""Bad input is refused by name, before anything is launched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_kernels import (
    InvalidInputError,
    KernelError,
    UnsupportedDeviceError,
    UnsupportedShapeError,
    choose_backend,
    mla_decode,
)
from tests.kernels.cases import DEVICE, Case, assert_matches, make_case

Change = Callable[[Case], dict[str, Any]]


def arguments(case: Case) -> dict[str, Any]:
    return {
        "q": case.q,
        "kv_cache": case.kv_cache,
        "block_table": case.block_table,
        "cache_seqlens": case.lengths,
        "head_dim_v": case.rank,
        "softmax_scale": case.scale,
    }


CHANGES: dict[str, tuple[type[KernelError], str, Change]] = {
    "q of three dims": (InvalidInputError, "q must be", lambda c: {"q": c.q[:, 0]}),
    "q of integers": (InvalidInputError, "q is torch.int32", lambda c: {"q": c.q.int()}),
    "no queries": (InvalidInputError, "not empty", lambda c: {"q": c.q[:, :0]}),
    "another dtype": (InvalidInputError, "kv_cache is torch.float16", lambda c: {"kv_cache": c.kv_cache.half()}),
    "another device": (InvalidInputError, "is on meta", lambda c: {"kv_cache": c.kv_cache.to("meta")}),
    "a cache of other rows": (InvalidInputError, "kv_cache must be", lambda c: {"kv_cache": c.kv_cache[..., :64]}),
    "a cache of four dims": (InvalidInputError, "kv_cache must be", lambda c: {"kv_cache": c.kv_cache[:, :, None]}),
    "a strided row": (
        InvalidInputError,
        "last dim of kv_cache",
        lambda c: {"kv_cache": torch.zeros(*c.kv_cache.shape[:2], 2 * 112, device=DEVICE)[..., ::2]},
    ),
    "lengths of 64 bits": (InvalidInputError, "cache_seqlens must be", lambda c: {"cache_seqlens": c.lengths.long()}),
    "too few lengths": (InvalidInputError, "cache_seqlens must be", lambda c: {"cache_seqlens": c.lengths[:1]}),
    "a table of 64 bits": (InvalidInputError, "block_table must be", lambda c: {"block_table": c.block_table.long()}),
    "a table of other rows": (InvalidInputError, "block_table must be", lambda c: {"block_table": c.block_table[:1]}),
    "a table without pages": (InvalidInputError, "no pages", lambda c: {"block_table": c.block_table[:, :0]}),
    "a window of nothing": (InvalidInputError, "window of 0", lambda c: {"window": 0}),
    "gradients": (InvalidInputError, "no backward pass", lambda c: {"q": c.q.clone().requires_grad_()}),
    "lengths in a list": (InvalidInputError, "cache_seqlens is a list", lambda c: {"cache_seqlens": [100, 20]}),
    "a rank that is no integer": (InvalidInputError, "head_dim_v is 96.0", lambda c: {"head_dim_v": 96.0}),
    "fp8 codes without their scales": (
        InvalidInputError,
        r"view\(torch.uint8\)",
        lambda c: {"kv_cache": c.kv_cache.to(torch.float8_e4m3fn)},
    ),
    "no splits": (InvalidInputError, "num_splits is 0", lambda c: {"num_splits": 0}),
    "too many splits": (InvalidInputError, "num_splits is 1000", lambda c: {"num_splits": 1000}),
    "an unknown backend": (InvalidInputError, "backend 'cuda'", lambda c: {"backend": "cuda"}),
    "an output of another shape": (InvalidInputError, "out must be", lambda c: {"out": c.q}),
    "a contiguous cache of another batch": (
        InvalidInputError,
        "one row for each",
        lambda c: {"block_table": None},
    ),
    "a RoPE part beside whole rows": (
        InvalidInputError,
        "with the RoPE part in rope_cache",
        lambda c: {"rope_cache": c.kv_cache[..., :16]},
    ),
    "a rank below a tile": (
        UnsupportedShapeError,
        "pad the latents",
        lambda c: {"head_dim_v": 8, "q": c.q[..., :24], "kv_cache": c.kv_cache[..., :24]},
    ),
    "a rank beyond the query": (InvalidInputError, "head_dim_v must be", lambda c: {"head_dim_v": 128}),
    "no rank": (InvalidInputError, "head_dim_v must be", lambda c: {"head_dim_v": 0}),
    "a RoPE part too wide": (
        UnsupportedShapeError,
        "RoPE",
        lambda c: {"head_dim_v": 16, "q": c.q.repeat(1, 1, 1, 2), "kv_cache": c.kv_cache.repeat(1, 1, 2)},
    ),
    "a page of 24": (UnsupportedShapeError, "page of 24", lambda c: {"kv_cache": c.kv_cache[:, :24]}),
}
OF_THE_KERNEL = ("a rank below a tile", "a RoPE part too wide", "gradients")
ON_THE_HOST: dict[str, tuple[type[KernelError], str, Change]] = {
    "a length beyond the table": (
        InvalidInputError,
        "does not fit a block_table of 2 pages",
        lambda c: {"cache_seqlens": torch.tensor([129, 5], dtype=torch.int32)},
    ),
    "a negative length": (
        InvalidInputError,
        "-1",
        lambda c: {"cache_seqlens": torch.tensor([-1, 5], dtype=torch.int32)},
    ),
    "a page that is not there": (
        InvalidInputError,
        "names page 2147480000",
        lambda c: {"cache_seqlens": torch.tensor([100, 65], dtype=torch.int32)},
    ),
}


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch, of any backend, fails the test."""
    from mla_kernels import eager, launch, reference

    def launched(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel ran on input that should have been refused")

    monkeypatch.setattr(launch, "_decode", launched)
    monkeypatch.setattr(eager, "eager_decode", launched)
    monkeypatch.setattr(reference, "reference_decode", launched)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
@pytest.mark.parametrize("name", [*CHANGES, *ON_THE_HOST])
def test_bad_input_is_refused(name: str, backend: str) -> None:
    error, message, change = {**CHANGES, **ON_THE_HOST}[name]
    if name in ON_THE_HOST and DEVICE.type == "cuda":
        pytest.skip("looking at lengths on a GPU would wait for it")
    if name in OF_THE_KERNEL and backend != "triton":
        pytest.skip("the other backends take it")
    case = make_case(96, 16, 3, (100, 20))
    with pytest.raises(error, match=message) as raised:
        mla_decode(**{**arguments(case), "backend": backend, **change(case)})
    assert raised.value.remedy


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
def test_lengths_may_be_strided_or_expanded(backend: Any) -> None:
    """The kernel reads them one after the other, whatever the caller's strides."""
    case = make_case(96, 16, 3, (60, 60))
    want = case.expected()
    strided = torch.tensor([60, 1, 60, 1], dtype=torch.int32, device=DEVICE)[::2]
    expanded = torch.tensor([60], dtype=torch.int32, device=DEVICE).expand(2)
    for lengths in (strided, expanded):
        assert_matches(replace(case, lengths=lengths).run(backend=backend), want, 1e-6)


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
def test_odd_but_right_arguments(backend: Any) -> None:
    """A scale in a tensor, a window beyond everything, a RoPE part of nothing kept apart, outputs in one piece."""
    case = make_case(96, 0, 3, (60, 60), page=None)
    want = case.expected()
    scale = torch.tensor(case.scale)
    out, lse = replace(case, scale=scale).run(backend=backend, window=2**63)
    assert_matches((out, lse), want, 1e-6)
    assert out.is_contiguous()
    paged = make_case(96, 0, 3, (60, 20))
    apart = paged.run(backend=backend, rope_cache=paged.kv_cache[..., :0])
    assert_matches(apart, paged.expected(), 1e-6)


def test_tensors_without_contents_are_refused() -> None:
    case = make_case(96, 16, 3, (60,), page=None)
    names = ("q", "kv_cache", "lengths")
    with pytest.raises(UnsupportedDeviceError, match="meta"):
        replace(case, **{name: getattr(case, name).to("meta") for name in names}).run(backend="torch")


@pytest.mark.parametrize(("rank", "rope_dim"), [(8, 16), (32, 160)])
def test_sizes_without_a_tile_are_for_the_other_backends(rank: int, rope_dim: int) -> None:
    case = make_case(rank, rope_dim, 3, (20, 0, 70))
    assert_matches(case.run(backend="torch"), case.run(backend="reference"), 1e-6)
    assert choose_backend("cuda", rank=rank, rope_dim=rope_dim).name == "torch"


def test_without_a_gpu_the_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = make_case(96, 16, 3, (20,))
    on_cpu = replace(
        case,
        q=case.q.cpu(),
        kv_cache=case.kv_cache.cpu(),
        block_table=case.block_table.cpu(),
        lengths=case.lengths.cpu(),
    )
    with pytest.raises(UnsupportedDeviceError, match='backend="torch"'):
        on_cpu.run()


def test_without_triton_the_torch_path_works_and_the_kernel_says_what_is_missing() -> None:
    """A process in which triton cannot be imported, as on a Mac."""
    script = """
import sys
sys.modules["triton"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else found(name, *rest)
import torch
from mla_kernels import UnsupportedDeviceError, choose_backend, mla_decode
arguments = (torch.randn(1, 1, 2, 48), torch.randn(1, 8, 48), None, torch.tensor([5], dtype=torch.int32), 32, 0.1)
assert mla_decode(*arguments, backend="torch")[0].isfinite().all()
assert choose_backend("cpu").name == "torch"
try:
    mla_decode(*arguments)
except UnsupportedDeviceError as error:
    assert "Triton is not installed" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_importing_the_package_imports_neither_torch_nor_triton() -> None:
    script = "import sys, mla_kernels; assert not {'torch', 'triton', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
