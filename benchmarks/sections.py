"""The sections of a run and the report that they write into.

GPU sections run in processes of their own: one that fails, hangs or loses its CUDA context costs its own results only,
and what it had measured until then is kept. Correctness is split over several, because compiling is what takes its
time; everything timed runs alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import describe

SCRIPT = Path(__file__).resolve().parent / "decode.py"
CONTEXTS = (2048, 8192)
MODEL_CONTEXTS = (512, 2048, 8192)
# The share of the time left that correctness may take, and the seconds after which a hanging first section is given up.
CHECKS_SHARE = 0.45
CEILINGS_SECONDS = 60.0
MAX_CHECKERS = 14


class Report:
    """What was measured so far, written to a file after every section and every single result of the CPU sections."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.content: dict[str, Any] = {
            "machine": describe(),
            "ceilings": None,
            "checks": [],
            "shapes": [],
            "layers": [],
            "bars": [],
            "model": [],
            "seconds": {},
            "errors": [],
        }

    def run(self, name: str, options: Namespace, end: float) -> None:
        """Run one section; an exception becomes an entry of ``errors``. ``end`` is on time.monotonic()'s clock."""
        started = time.monotonic()
        try:
            if name == "layers":
                self._layers(options)
            elif name == "model":
                self._model(options)
            else:
                self._in_children(name, options, end)
        except Exception:
            self._error(name, traceback.format_exc())
        self.content["seconds"][name] = round(time.monotonic() - started, 1)
        self.write()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        if self.file is not None:
            _write_json(self.content, self.file)

    def _error(self, section: str, text: str) -> None:
        self.content["errors"].append({"section": section, "error": text})

    def _layers(self, options: Namespace) -> None:
        import torch

        from benchmarks.cpu_decode import bars, measure_layers
        from benchmarks.shapes import CPU_SHAPES, TINY

        shapes, contexts, rounds = ((TINY,), (48,), 2) if options.quick else (CPU_SHAPES, CONTEXTS, options.rounds)
        for threads in options.threads:
            for result in measure_layers(shapes, contexts, threads, rounds, torch.float32):
                self.content["layers"].append(result)
                self.write()
        self.content["bars"] = bars(self.content["layers"])

    def _model(self, options: Namespace) -> None:
        import torch

        from benchmarks.model_decode import load_models, measure_models

        if options.model is None:
            raise ValueError("the section `model` needs --model FOLDER, which `mla-convert convert` wrote")
        contexts, rounds, tokens = ((16,), 2, 2) if options.quick else (MODEL_CONTEXTS, options.rounds, 4)
        source, converted = load_models(options.source, options.model, torch.float32)
        for threads in options.threads:
            for result in measure_models(source, converted, contexts, threads, rounds, tokens):
                self.content["model"].append(result)
                self.write()

    def _in_children(self, name: str, options: Namespace, end: float) -> None:
        left = end - time.monotonic()
        if left < 5:
            raise TimeoutError(f"no time was left for the section `{name}`")
        if name == "ceilings":
            for results in self._children(name, options, end=end - max(0.0, left - CEILINGS_SECONDS)):
                self.content["ceilings"] = results[0] if results else None
        elif name == "checks":
            self._checks(options, end - left * (1 - CHECKS_SHARE))
        else:
            self._shapes(options, end)

    def _checks(self, options: Namespace, end: float) -> None:
        parts = 1 if options.quick else max(1, min(MAX_CHECKERS, (os.cpu_count() or 2) - 2))
        checks = self.content["checks"]
        for results in self._children("checks", options, parts=parts, at_once=parts, end=end):
            checks += results
            self.write()
        if failed := sum(not check["passed"] for check in checks):
            self._error("checks", f"{failed} of {len(checks)} failed")

    def _shapes(self, options: Namespace, end: float) -> None:
        from benchmarks.floors import add_floors
        from benchmarks.shapes import GPU_SHAPES

        found: list[dict[str, Any]] = []
        for results in self._children("shapes", options, parts=1 if options.quick else len(GPU_SHAPES), end=end):
            found += results
            self.content["shapes"] = add_floors(found, self.content["ceilings"])
            self.write()
        for result in self.content["shapes"]:
            if "error" in result:
                self._error("shapes", f"{result['shape']}, {result['batch']} x {result['tokens']}: {result['error']}")

    def _children(
        self, name: str, options: Namespace, *, end: float, parts: int = 1, at_once: int = 1
    ) -> Iterator[list[dict[str, Any]]]:
        """Run a section's parts, ``at_once`` of them together, until ``end``; yield the results of each."""
        with tempfile.TemporaryDirectory() as folder:
            for first in range(0, parts, at_once):
                waves_left = -(-(parts - first) // at_once)
                wave_end = time.monotonic() + (end - time.monotonic()) / waves_left
                wave = [(part, Path(folder) / f"{part}.json") for part in range(first, min(first + at_once, parts))]
                running = [_start(name, part, parts, options, file, wave_end) for part, file in wave]
                for (part, file), process in zip(wave, running, strict=True):
                    ending = _wait(process, wave_end)
                    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
                    for error in [*found.get("errors", []), *([ending] if ending else [])]:
                        self._error(f"{name}, part {part}", error)
                    yield found.get("results", [])


def suitable(options: Namespace) -> list[str]:
    """Return the sections that suit this machine: the GPU's where there is one, else the CPU's."""
    import torch

    if torch.cuda.is_available():
        return ["ceilings", "checks", "shapes"]
    return ["layers", "model"] if options.model is not None else ["layers"]


def run_child(options: Namespace) -> None:
    """Run one part of a GPU section in this process, writing each result to the file as it comes."""
    content: dict[str, list[Any]] = {"results": [], "errors": []}
    try:
        for result in _part(options):
            content["results"].append(result)
            _write_json(content, options.json)
    except Exception:
        content["errors"].append(traceback.format_exc())
    _write_json(content, options.json)


def _part(options: Namespace) -> Iterator[dict[str, Any]]:
    end = time.monotonic() + options.deadline
    if options.child == "ceilings":
        from benchmarks.ceilings import measure_ceilings

        yield measure_ceilings()
    elif options.child == "checks":
        from benchmarks.gpu_checks import run_checks

        yield from run_checks(options.part, options.parts, quick=options.quick, end=end)
    else:
        from benchmarks.gpu_decode import measure_shape
        from benchmarks.shapes import GPU_SHAPES, TINY

        yield from measure_shape(TINY if options.quick else GPU_SHAPES[options.part], quick=options.quick, end=end)


def _start(name: str, part: int, parts: int, options: Namespace, file: Path, end: float) -> subprocess.Popen[bytes]:
    # The child is asked to end a little before it would be killed.
    seconds = max(1.0, end - time.monotonic() - 3)
    command = [sys.executable, str(SCRIPT), "--child", name, "--part", str(part), "--parts", str(parts)]
    command += ["--json", str(file), "--deadline", f"{seconds:.1f}", *(["--quick"] if options.quick else [])]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


def _wait(process: subprocess.Popen[bytes], end: float) -> str | None:
    """Wait until ``end`` and kill what still runs; return what went wrong, if anything did."""
    try:
        code = process.wait(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "stopped at the deadline; its results until then are kept"
    return None if code == 0 else f"ended with exit code {code}; its results until then are kept"


def _write_json(content: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)
