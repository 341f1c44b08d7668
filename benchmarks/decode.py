"""Measure decoding on this machine and write what was measured as JSON.

    python benchmarks/decode.py [--json FILE] [--quick] [--only SECTION ...]

With a CUDA device: its ceilings, correctness against float64, and the shapes of a decode step against SDPA on the
unconverted layer. Without one: one layer on the CPU, and with --model the whole of SmolLM2. README.md has the details.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPU_SECTIONS = ("ceilings", "checks", "shapes")
CPU_SECTIONS = ("layers", "model")
DEADLINE_SECONDS = 285.0


def main(arguments: list[str] | None = None) -> int:
    """Run the sections that were asked for; return 0, or 1 where a section failed."""
    options = _parser().parse_args(arguments)
    for place in (ROOT, ROOT / "kernels"):
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
    from benchmarks import sections, tables

    started = time.monotonic()
    if options.child:
        sections.run_child(options)
        return 0
    report = sections.Report(options.json)
    for name in options.only or sections.suitable(options):
        report.run(name, options, started + options.deadline)
    print(tables.render(report.content))
    return 1 if report.content["errors"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure decoding on this machine and write what was measured as JSON."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, anew after each section")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few rounds: whether it runs, no numbers")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=GPU_SECTIONS + CPU_SECTIONS,
        metavar="SECTION",
        help=f"run these sections: {', '.join(GPU_SECTIONS + CPU_SECTIONS)}",
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="converted model of the section `model`")
    parser.add_argument("--source", default="builtin:smollm2-135m", help="its source (default: %(default)s)")
    parser.add_argument("--threads", nargs="+", type=int, default=[1], metavar="N", help="CPU threads (default: 1)")
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="interleaved rounds (default: %(default)s)")
    parser.add_argument(
        "--deadline",
        type=float,
        default=DEADLINE_SECONDS,
        metavar="SECONDS",
        help="the GPU sections stop after this long and say what was left out (default: %(default)s)",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=int, default=1, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
