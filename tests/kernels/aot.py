"""Compile the decode kernels for devices that are not here, and read what they would use there.

Triton's wheel carries ptxas, cuobjdump and nvdisasm, so registers, spills, shared memory and the machine code are known
without a GPU. The compilations run in processes of their own: the interpreter, which the other tests use, is chosen for
a whole process when triton is imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mla_kernels.tiles import Tile, latent_chunks, padded_rope_dim

POINTERS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
OPCODES = ("HGMMA", "HMMA", "UTCHMMA", "LDGSTS", "LDL", "STL")


@dataclass(frozen=True)
class Build:
    """One specialisation of `decode_kernel` for one device."""

    arch: int | str
    tile: Tile
    rank: int
    rope_dim: int = 64
    dtype: str = "bf16"
    page: int = 64
    paged: bool = True
    causal: bool = False
    window: bool = False
    fp8: bool = False
    kernel: str = "mla_kernels.kernel:decode_kernel"


@dataclass(frozen=True)
class Resources:
    """What a compilation uses: shared memory in bytes, registers a thread, bytes spilled, counts of instructions."""

    shared: int
    registers: int
    stack: int
    spilled: int
    opcodes: dict[str, int]
    loop_copies: int


def compile_all(builds: list[Build]) -> list[Resources | str]:
    """Return each build's resources, or the compiler's error as text, compiling on every processor."""
    processes = min(len(builds), os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_compiling) as pool:
        return list(pool.map(_compile, builds))


def _compiling() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"


def _compile(build: Build) -> Resources | str:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget

    module, name = build.kernel.split(":")
    source = _source(build, getattr(importlib.import_module(module), name))
    amd = isinstance(build.arch, str)
    target = GPUTarget("hip", build.arch, 64) if amd else GPUTarget("cuda", build.arch, 32)
    options = {"num_warps": build.tile.num_warps, "num_stages": build.tile.num_stages}
    try:
        compiled: Any = triton.compile(source, target=target, options=options)
    except Exception as error:  # whatever a compiler raises is the result
        return f"{type(error).__name__}: {error}"
    shared = compiled.metadata.shared
    return _amd(compiled.asm["amdgcn"], shared) if amd else _nvidia(compiled.asm["cubin"], shared)


def _source(build: Build, kernel: Any) -> Any:
    from triton.compiler import ASTSource

    element = POINTERS[build.dtype]
    pointers = {
        "Q": element,
        "LATENT": "*u8" if build.fp8 else element,
        "ROPE": "*bf16" if build.fp8 else element,
        "SCALES": "*fp32",
        "VALUES": element,
        "TABLE": "*i32",
        "LENGTHS": "*i32",
        "OUT": "*fp32",
        "LSE": "*fp32",
    }
    chunks = latent_chunks(build.rank, fp8=build.fp8)
    constants = {
        "C": build.rank,
        **{f"C{i}": width for i, width in enumerate(chunks)},
        "R": build.rope_dim,
        "R_PADDED": padded_rope_dim(build.rope_dim),
        "BLOCK_M": build.tile.block_m,
        "BLOCK_N": build.tile.block_n,
        "PAGE": build.page,
        "PAGED": build.paged,
        "CAUSAL": build.causal,
        "WINDOW": build.window,
        "FP8": build.fp8,
        "PTX": not isinstance(build.arch, str),
        "UPCAST": False,
    }
    names = kernel.arg_names
    # What the launcher finds divisible by 16 for ranks and RoPE sizes that are.
    aligned = {*pointers, *(n for n in names if n.startswith("stride_")), "capacity"}
    aligned -= {"stride_tb", "stride_es", "stride_eb", "stride_sp", "stride_st"}
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "fp32" if name == "scale_log2" else "i32")
        for name in names
    }
    return ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in names},
    )


def _nvidia(cubin: bytes, shared: int) -> Resources:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump's report has changed: {usage[-300:]}")
    registers, stack, _, local = map(int, found.groups())
    counts = {op: len(re.findall(rf"\b{op}\b", code)) for op in OPCODES}
    return Resources(shared, registers, stack, local + counts["STL"], counts, _copies_in_loops(code))


def _copies_in_loops(code: str) -> int:
    """Count asynchronous copies between a label and a backward branch to it: those of the loop over tiles."""
    lines = code.splitlines()
    labels = {match.group(1): i for i, line in enumerate(lines) if (match := re.match(r"\s*(\.L_x_\d+):", line))}
    inside: set[int] = set()
    for i, line in enumerate(lines):
        branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if branch and labels.get(branch.group(1), i) < i:
            inside |= set(range(labels[branch.group(1)], i))
    return sum("LDGSTS" in lines[i] for i in inside)


def _amd(assembly: str, shared: int) -> Resources:
    def number(key: str) -> int:
        found = re.search(rf"{re.escape(key)}:?\s+(\d+)", assembly)
        if found is None:
            raise ValueError(f"the assembly states no {key}")
        return int(found.group(1))

    counts = {"MFMA": len(re.findall(r"v_mfma", assembly))}
    return Resources(shared, number(".vgpr_count"), number("; ScratchSize"), number(".vgpr_spill_count"), counts, 0)
