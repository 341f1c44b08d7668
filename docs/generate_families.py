"""Write docs/families.md from the registry of families and what the conformance tests measured of each.

python docs/generate_families.py            write it
python docs/generate_families.py --check    exit with 1 if the file is not what would be written

docs/families.json holds the measurements; `python -m tests.sources.measure_families` makes them.
"""

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mla_convert.features import TRAITS
from mla_convert.sources.adapter import Adapter
from mla_convert.sources.registry import ADAPTERS

FOLDER = Path(__file__).resolve().parent
PAGE, MEASURED = FOLDER / "families.md", FOLDER / "families.json"

INTRODUCTION = """\
# Model families

A source is known by the entry of `architectures` in its `config.json`. Those below are converted, each exactly at full
rank; anything else is refused with the reason and what to do. `mla-convert inspect SOURCE` says what a checkpoint has.
[Adding a family](add-a-model.md) is one file.

Weights may be stored as float32, bfloat16 or float16, or as float8 with scales for blocks, rows or tensors (`fp8`, and
`compressed-tensors` of that kind), which are read as their product rounded to bfloat16. GGUF files of Llama, Mistral
and Qwen2 are read too. Other quantised checkpoints are refused, each method with what to do instead.

The difference is the largest |Δ logit| between transformers' own class and the converted model, expanded or absorbed,
over all tiny random variants of the family that the tests build, by recipe `exact` in float32{versions}; shown
is the variant where it is largest beside the standard deviation σ of the logits. What is left is rounding.
`python docs/generate_families.py` writes this page.
"""

LEGEND = """\
## What is special

● in every variant that is tested, ○ in some. Llama's plain block has none of these. Norms of queries and keys cost one
more cached number for each norm; nothing else adds to C + R.
"""


def measurements() -> Mapping[str, Any]:
    """Return what docs/families.json holds; nothing where it is not there."""
    return json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.is_file() else {}


def page(measured: Mapping[str, Any]) -> str:
    """Return docs/families.md."""
    versions = ", ".join(f"{name} {version}" for name, version in measured.get("versions", {}).items())
    families = measured.get("families", {})
    sections = [INTRODUCTION.format(versions=f" ({versions})" if versions else "")]
    header = ["| family | architecture | variants | largest difference | σ of logits |", "|---|---|---|---|---|"]
    sections.append("\n".join([*header, *(_row(adapter, families) for adapter in ADAPTERS)]) + "\n")
    shown = [trait for trait in TRAITS if any(_marks(families, adapter)[trait] for adapter in ADAPTERS)]
    if shown:
        table = [f"| family | {' | '.join(shown)} |", "|---|" + ":-:|" * len(shown)]
        table += [
            f"| {adapter.family} | {' | '.join(_marks(families, adapter)[trait] for trait in shown)} |"
            for adapter in ADAPTERS
        ]
        sections += [LEGEND, "\n".join(table) + "\n"]
    sections += ["## Each family\n", "\n".join(_described(adapter) for adapter in ADAPTERS) + "\n"]
    return "\n".join(sections)


def unknown_in(measured: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is measured and has no adapter, a sentence each."""
    known = {adapter.architecture for adapter in ADAPTERS}
    for name in measured.get("families", {}):
        if name not in known:
            yield f"docs/families.json measures {name}, which no adapter is for"


def _row(adapter: type[Adapter], families: Mapping[str, Any]) -> str:
    variants = families.get(adapter.architecture, {}).get("variants", {})
    start = f"| {adapter.family} | `{adapter.architecture}` |"
    if not variants:
        return f"{start} - | not measured | - |"
    worst = max(variants.values(), key=lambda variant: variant["max_logit_difference"] / variant["logit_std"])
    return f"{start} {len(variants)} | {worst['max_logit_difference']:.1e} | {worst['logit_std']:.2g} |"


def _marks(families: Mapping[str, Any], adapter: type[Adapter]) -> Mapping[str, str]:
    """Each trait's mark for a family: in all of its variants, in some, in none."""
    variants = families.get(adapter.architecture, {}).get("variants", {})
    found = [set(variant.get("traits", ())) for variant in variants.values()]
    counts = {trait: sum(trait in traits for traits in found) for trait in TRAITS}
    return {trait: "" if not count else "●" if count == len(found) else "○" for trait, count in counts.items()}


def _described(adapter: type[Adapter]) -> str:
    """What its file and its class say of a family, in a list's item."""
    module = (sys.modules[adapter.__module__].__doc__ or "").split("\n\n")[0]
    own = (adapter.__dict__.get("__doc__") or "").split("\n\n")[0]
    said = " ".join(f"{module} {own}".split()).replace("``", "`")
    return textwrap.fill(f"- **{adapter.family}**: {said}", 120, subsequent_indent="  ", break_long_words=False)


def main(arguments: list[str]) -> int:
    """Write or check; return the exit code."""
    measured = measurements()
    if arguments != ["--check"]:
        PAGE.write_text(page(measured), encoding="utf-8")
        return 0
    wrong = [*unknown_in(measured)]
    if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page(measured):
        wrong.append("docs/families.md is not what the families' code and docs/families.json say: run `make docs`")
    for problem in wrong:
        print(problem, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
