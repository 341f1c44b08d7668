"""`mla-convert convert` beside a plain implementation of TransMLA's pipeline: time, memory, and what comes out.

python -m benchmarks.convert [--source builtin:smollm2-135m] [--tokens 16384] [--recipes forward default] [--json FILE]

Every candidate is a process of its own, from its start to its end (imports, reading and writing included), on the same
model, the same contexts of the same text, as many threads and the same cache; one runs at a time, and they take turns.
Time is by the clock and by the processor, memory the most that was resident. Then the perplexity of all that was
written is measured on text that none of them saw. This process stays small: a child's peak begins with its parent's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from benchmarks.machine import describe

REFERENCE = "reference"
_ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="builtin:smollm2-135m")
    parser.add_argument("--tokens", type=int, default=16_384, help="to calibrate on")
    parser.add_argument("--context", type=int, default=512, help="tokens in a context")
    parser.add_argument("--cache", type=float, default=0.5, help="share of the source's cache")
    parser.add_argument("--recipes", nargs="+", default=["forward", "default"])
    parser.add_argument("--modes", nargs="+", choices=("whole", "low-memory"), default=["whole", "low-memory"])
    parser.add_argument("--fold", type=int, default=2, help="pairs that share a frequency, in the reference")
    parser.add_argument("--calibration", type=Path, help="text; with --text, instead of parts of builtin:pydoc")
    parser.add_argument("--text", type=Path, help="text to measure perplexity on")
    parser.add_argument("--evaluation-tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder unless given")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if (options.calibration is None) != (options.text is None):
        parser.error("--calibration and --text go together")
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        result = measure(options, Path(place))
    print(render(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Return what every candidate took and what came of it, and the perplexity of the source."""
    if options.text is None:
        options.calibration, options.text = split_topics(place)
    before = describe()
    commands = {REFERENCE: _reference(options)}
    for recipe in options.recipes:
        commands |= {f"{recipe} --{mode}": _ours(options, recipe, mode) for mode in options.modes}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for turn in range(options.rounds):
        for i, (name, command) in enumerate(commands.items()):
            out = place / f"{i}-{turn}"
            runs[name].append(run([argument.replace("OUT", str(out)) for argument in command], options.threads))
    scores = {name: _evaluate(options, str(place / f"{i}-0")) for i, name in enumerate(commands)}
    source = _evaluate(options, options.source)
    candidates = {name: _summary(runs[name], scores[name], runs[REFERENCE]) for name in commands}
    asked = {
        name: getattr(options, name) for name in ("source", "tokens", "context", "cache", "fold", "threads", "rounds")
    }
    return {
        "machine": before | {"load_average_after": describe()["load_average"]},
        "asked": asked,
        "evaluation": {"tokens": source["tokens"], "sha256": source["text"]["sha256"]},
        "source": {"perplexity": source["perplexity"], "cache_bytes": source["cache_bytes_per_token"]},
        "candidates": candidates,
    }


def split_topics(place: Path) -> tuple[Path, Path]:
    """Write Python's language reference in two parts, and return the files: to calibrate on, and every fourth topic.

    Topics share paragraphs; the second part has none that is in the first.
    """
    parts = [[part for part in map(_bare, topics[name].split("\n\n")) if part] for name in sorted(topics)]
    seen = [part for i, topic in enumerate(parts) if i % 4 for part in topic]
    known = set(seen)
    unseen = [part for topic in parts[::4] for part in topic if part not in known]
    files = place / "calibration.txt", place / "unseen.txt"
    for file, paragraphs in zip(files, (seen, unseen), strict=True):
        file.write_text("\n\n".join(dict.fromkeys(paragraphs)), encoding="utf-8")
    return files


def _bare(paragraph: str) -> str:
    return paragraph.strip("\n")


def run(command: Sequence[str], threads: int) -> dict[str, Any]:
    """Run a program to its end and return seconds, peak memory and the JSON that it printed."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    paths = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | dict.fromkeys(names, str(threads)) | {"PYTHONPATH": paths}
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as complaints:
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, *command], stdout=printed, stderr=complaints, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        complaints.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{complaints.read().decode()}")
        return {
            "seconds": seconds,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            "printed": json.loads(printed.read()),
        }


def render(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table, its last two columns against the reference, and what it ran on."""
    machine, asked = result["machine"], result["asked"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    load = f"load {machine['load_average']} before and {machine['load_average_after']} after"
    unseen = f"{result['evaluation']['tokens']} unseen tokens, source {result['source']['perplexity']:.2f}"
    counts = f"{asked['tokens']} tokens of calibration, {asked['threads']} threads, rounds: {asked['rounds']}"
    head = ["", "seconds", "of CPU", "peak MB", "cache bytes a token", "perplexity", "× faster", "of its memory"]
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {load}; {versions}",
        f"{asked['source']}, {counts}; perplexity on {unseen}",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for name, found in result["candidates"].items():
        lines.append(
            f"| {name} | {found['seconds']:.1f} | {found['cpu_seconds']:.1f} | {found['peak_bytes'] / 1e6:.0f} "
            f"| {found['cache_bytes']:g} | {found['perplexity']:.2f} | {found['speedup']:.2f} "
            f"| {found['memory_ratio']:.2f} |"
        )
    for name, found in result["candidates"].items():
        lines += ["", f"{name}: " + ", ".join(f"{stage} {s:.1f} s" for stage, s in found["timings"].items())]
    return "\n".join(lines)


def _reference(options: argparse.Namespace) -> list[str]:
    command = ["-m", "benchmarks.reference_pipeline", options.source, "OUT"]
    command += ["--text", str(options.calibration), "--tokens", str(options.tokens), "--context", str(options.context)]
    return [*command, "--cache", str(options.cache), "--fold", str(options.fold)]


def _ours(options: argparse.Namespace, recipe: str, mode: str) -> list[str]:
    command = ["-m", "mla_convert", "convert", options.source, "OUT", "--recipe", recipe, f"--{mode}"]
    command += ["--set", f"calibration.context={options.context}", "--calibration", str(options.calibration)]
    command += ["--calibration-tokens", str(options.tokens), "--cache", str(options.cache)]
    return [*command, "--json"]


def _evaluate(options: argparse.Namespace, model: str) -> dict[str, Any]:
    command = ["-m", "mla_convert", "evaluate", model, "--text", str(options.text), "--context", str(options.context)]
    command += ["--max-tokens", str(options.evaluation_tokens), "--json"]
    return run(command, options.threads)["printed"]


def _summary(
    runs: Sequence[dict[str, Any]], score: dict[str, Any], reference: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Medians of the times, the greatest peak, and how they compare."""
    seconds, cpu = (statistics.median(found[name] for found in runs) for name in ("seconds", "cpu_seconds"))
    peak = max(found["peak_bytes"] for found in runs)
    printed = runs[0]["printed"]
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_bytes": peak,
        "runs": [{name: value for name, value in found.items() if name != "printed"} for found in runs],
        "timings": printed.get("record", printed)["timings"],
        "perplexity": score["perplexity"],
        "cache_bytes": score["cache_bytes_per_token"],
        "speedup": statistics.median(found["seconds"] for found in reference) / seconds,
        "memory_ratio": peak / max(found["peak_bytes"] for found in reference),
    }


if __name__ == "__main__":
    main()
