"""Whether the kernel is right on this card: against float64, bit for bit from run to run, and inside a CUDA graph."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.inputs import DecodeInputs, make_inputs, softmax_scale
from benchmarks.shapes import GPU_SHAPES
from mla_kernels import mla_decode
from mla_kernels.reference import reference_decode

LENGTHS = (0, 1, 63, 64, 65, 700, 1531)
# ‖out − reference‖ / ‖reference‖ of rounding the inputs of two products to the dtype and the sum to its output. float32
# products are three tf32 products, which keep about 21 bits; the reference reads the same rounded inputs.
TOLERANCES = {"bfloat16": 1e-2, "float16": 1.5e-3, "float32": 2e-5}
# An fp8 code times its scale is rounded to the query's dtype before the products.
FP8_TOLERANCE, FP8_LSE_TOLERANCE = 1e-2, 2e-2
LSE_TOLERANCES = {"bfloat16": 1e-3, "float16": 1e-3, "float32": 1e-4}
REPEATS = 20


@dataclass(frozen=True)
class Case:
    """One comparison with the reference."""

    rank: int
    rope_dim: int
    heads: int
    dtype: str
    queries: int
    paged: bool
    fp8: bool


def all_cases(quick: bool) -> list[Case]:
    """Return the grid, in the order in which it is run: first what is timed later, then the rest in a seeded order.

    Every rank, RoPE dim, head count and dtype meet; page layout, query count and fp8 alternate over that product.
    """
    if quick:
        return [Case(32, 16, 4, "float32", 2, True, False), Case(32, 16, 4, "float16", 1, False, True)]
    timed = [
        Case(shape.rank, shape.rope_dim, shape.heads, "bfloat16", 1, True, fp8)
        for shape in GPU_SHAPES
        for fp8 in (False, True)
    ]
    grid = [
        (rank, rope_dim, heads, dtype)
        for rank in (96, 160, 256, 448, 512)
        for rope_dim in (32, 64)
        for heads in (1, 9, 32, 128)
        for dtype in ("bfloat16", "float16", "float32")
    ]
    rest = [
        Case(*sizes, queries=1 + number % 2, paged=number % 3 != 1, fp8=sizes[3] != "float32" and number % 4 == 0)
        for number, sizes in enumerate(grid)
    ]
    random.Random(0).shuffle(rest)
    return timed + rest


def run_checks(part: int, parts: int, *, quick: bool, end: float) -> Iterator[dict[str, Any]]:
    """Yield one result for each of this part's cases until ``end``; the last says how many there was no time for."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    work: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (str(case), lambda case=case, number=number: compare(case, number, device))
        for number, case in enumerate(all_cases(quick))
    ]
    if not quick:
        work[len(GPU_SHAPES) * 2 : len(GPU_SHAPES) * 2] = [
            ("same bits at rank 256", lambda: repeated(device)),
            ("graph replay with other lengths", lambda: replayed(device)),
        ]
    mine = work[part::parts]
    for number, (name, check) in enumerate(mine):
        if time.monotonic() > end:
            yield {"check": "not run", "cases": len(mine) - number, "passed": True}
            return
        started = time.monotonic()
        try:
            result = check()
        except Exception as error:
            result = {"check": name, "passed": False, "error": f"{type(error).__name__}: {error}"[:600]}
        yield result | {"seconds": round(time.monotonic() - started, 2)}


def compare(case: Case, seed: int, device: torch.device) -> dict[str, Any]:
    """Return cosine, greatest and relative error of output and LSE against float64 on inputs with NaN where unused."""
    inputs = make_inputs(
        (0, 5, 70) if case.rank < 64 else LENGTHS,
        case.heads,
        case.rank,
        case.rope_dim,
        queries=case.queries,
        dtype=getattr(torch, case.dtype),
        paged=case.paged,
        fp8=case.fp8,
        device=device,
        seed=seed,
    )
    out, lse = decode(inputs, case.rank, case.rope_dim)
    wanted, wanted_lse = reference(inputs, inputs.cache, case.rank, case.rope_dim)
    errors = difference(out, wanted)
    finite = wanted_lse.isfinite()
    lse_error = (lse.double().cpu() - wanted_lse)[finite].abs().max().item()
    empty_agrees = torch.equal(lse.cpu().isneginf(), ~finite)
    result = {"check": "float64", **asdict(case), **errors, "lse_max_abs": lse_error}
    if case.fp8:
        unpacked, _ = reference(inputs, inputs.latent, case.rank, case.rope_dim)
        result["relative_to_unquantised"] = difference(out, unpacked)["relative"]
    relative = errors["relative"]
    tolerance = FP8_TOLERANCE if case.fp8 else TOLERANCES[case.dtype]
    lse_tolerance = FP8_LSE_TOLERANCE if case.fp8 else LSE_TOLERANCES[case.dtype]
    passed = relative is not None and relative <= tolerance and lse_error <= lse_tolerance and empty_agrees
    return result | {"passed": passed}


def repeated(device: torch.device) -> dict[str, Any]:
    """Return whether the same call gives the same bits every time, at rank 256, with several splits."""
    inputs = make_inputs((4096, 3000, 17), 32, 256, 64, device=device)
    first = decode(inputs, 256, 64)
    same = 0
    for _ in range(REPEATS):
        out, lse = decode(inputs, 256, 64)
        same += torch.equal(out, first[0]) and torch.equal(lse, first[1])
    return {"check": "same bits at rank 256", "repeats": REPEATS, "same": same, "passed": same == REPEATS}


def replayed(device: torch.device) -> dict[str, Any]:
    """Return whether a captured call, replayed after the lengths changed in place, gives what an eager call gives."""
    inputs = make_inputs((4096, 4096, 4096, 4096), 32, 512, 64, device=device)
    decode(inputs, 512, 64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode(inputs, 512, 64)
    agree = []
    for lengths in ((4096, 4096, 4096, 4096), (1, 64, 0, 4096), (777, 4000, 65, 2048)):
        inputs.lengths.copy_(torch.tensor(lengths, dtype=torch.int32, device=device))
        graph.replay()
        eager_out, eager_lse = decode(inputs, 512, 64)
        torch.cuda.synchronize()
        agree.append(torch.equal(out, eager_out) and torch.equal(lse, eager_lse))
    return {"check": "graph replay with other lengths", "agree": agree, "passed": all(agree)}


def decode(inputs: DecodeInputs, rank: int, rope_dim: int) -> tuple[Tensor, Tensor]:
    """Run the kernel on the inputs."""
    scale = softmax_scale(rank, rope_dim)
    return mla_decode(inputs.q, inputs.cache, inputs.block_table, inputs.lengths, rank, scale)


def reference(inputs: DecodeInputs, cache: Tensor, rank: int, rope_dim: int) -> tuple[Tensor, Tensor]:
    """Return output and LSE in float64, computed on the CPU, reading ``cache`` in the place of the inputs' own."""
    table = None if inputs.block_table is None else inputs.block_table.cpu()
    scale = softmax_scale(rank, rope_dim)
    return reference_decode(inputs.q.cpu(), cache.cpu(), table, inputs.lengths.cpu(), rank, scale)


def difference(out: Tensor, wanted: Tensor) -> dict[str, float | None]:
    """Return 1 − cosine, the greatest and the relative error; None where ``out`` has a NaN or an infinity."""
    found, wanted = out.double().cpu().flatten(), wanted.double().cpu().flatten()
    if not found.isfinite().all():
        return {"one_minus_cosine": None, "max_abs": None, "relative": None}
    error = found - wanted
    cosine = torch.dot(found, wanted) / (found.norm() * wanted.norm())
    return {
        "one_minus_cosine": abs(1 - cosine.item()),
        "max_abs": error.abs().max().item(),
        "relative": (error.norm() / wanted.norm()).item(),
    }
