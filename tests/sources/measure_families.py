"""Measures full-rank conversions of every family for docs/families.json: `python -m tests.sources.measure_families`.

Every variant of every conformance class is converted by the recipe `exact` in float32, and its logits are compared with
transformers' on the same tokens, expanded and absorbed. Architectures as arguments: only these are measured again.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from mla_convert.features import traits
from mla_convert.pipeline import ConvertRequest, convert
from mla_convert.sources.registry import ADAPTERS
from tests.sources.conformance import AdapterConformance, Case
from tests.sources.conversion import prompt

FILE = Path(__file__).parents[2] / "docs" / "families.json"


def conformance_classes() -> Iterator[type[AdapterConformance]]:
    """Every subclass of the conformance tests."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.sources.{file.stem}")
        for _, found in inspect.getmembers(module, inspect.isclass):
            if issubclass(found, AdapterConformance) and found.__module__ == module.__name__:
                yield found


@torch.no_grad()
def logit_difference(case: Case, folder: Path) -> tuple[float, float]:
    """Return max |d logit| between the converted case and the source, and the source's standard deviation."""
    convert(ConvertRequest(source=str(case.folder), out=folder / "out", recipe="exact", dtype="float32"))
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32).eval()
    ids = prompt(case)
    expected = case.load()(ids, use_cache=False).logits
    worst = 0.0
    for mode in ("expanded", "absorbed"):
        model.set_attention_mode(mode)
        worst = max(worst, (model(ids, use_cache=False).logits - expected).abs().max().item())
    return worst, expected.std().item()


def measure(architectures: Sequence[str] = ()) -> dict[str, Any]:
    """Return, by architecture (all, or those named), the variants measured and the largest differences."""
    found: dict[str, dict[str, Any]] = {}
    for tests in conformance_classes():
        for name, build in tests.variants.items():
            model = build()
            architecture = type(model).__name__
            if architectures and architecture not in architectures:
                continue
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                case = Case(model, folder / "source")
                difference, spread = logit_difference(case, folder)
            row = found.setdefault(architecture, {"variants": {}})
            row["variants"][name] = {
                "max_logit_difference": float(f"{difference:.2g}"),
                "logit_std": float(f"{spread:.3g}"),
                "traits": list(traits(case.source.spec)),
            }
    return found


def main(architectures: Sequence[str]) -> None:
    """Write docs/families.json, or only the architectures named into it."""
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    before = json.loads(FILE.read_text(encoding="utf-8"))["families"] if architectures else {}
    families = before | measure(architectures)
    known = [adapter.architecture for adapter in ADAPTERS]
    ordered = {name: families[name] for name in sorted(families, key=known.index)}
    FILE.write_text(json.dumps({"versions": versions, "families": ordered}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
