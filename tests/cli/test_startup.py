"""What the command line loads before it has anything to do."""

import json
import subprocess
import sys

import pytest

COMMANDS = ("inspect", "plan", "convert", "heal", "evaluate", "absorb", "generate", "push")
HEAVY = (
    "accelerate", "click", "datasets", "gguf", "huggingface_hub", "numpy", "safetensors", "torch",
    "transformers", "yaml",
)  # fmt: skip

# Runs a command line in a fresh interpreter; the last line of standard error is what it has loaded.
SCRIPT = """
import json, sys
from mla_convert.cli import run
code = run(json.loads(sys.argv[1]))
print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})), file=sys.stderr)
sys.exit(code)
"""


def loaded_by(*arguments: str) -> tuple[str, set[str]]:
    """Return standard output and the top-level packages that a command line has loaded when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(arguments)], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout, set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [("--help",), (), *((command, "--help") for command in COMMANDS)], ids=" ".join)
def test_help_loads_nothing_heavy(arguments: tuple[str, ...]) -> None:
    output, loaded = loaded_by(*arguments)
    assert output.startswith("Usage: mla-convert")
    assert loaded.isdisjoint({*HEAVY, "rich"})


def test_help_does_not_load_torch_through_the_script() -> None:
    """The same through ``python -m mla_convert``, as the interpreter itself reports its imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mla_convert", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "typer" in imported
    assert not {name for name in imported if name.partition(".")[0] in {"torch", "transformers"}}


def test_version_names_what_decides_a_result_without_loading_it() -> None:
    import torch
    import transformers

    from mla_convert import __version__

    output, loaded = loaded_by("--version")
    assert f"mla-convert {__version__}" in output.splitlines()
    assert f"torch {torch.__version__}" in output.splitlines()
    assert f"transformers {transformers.__version__}" in output.splitlines()
    assert loaded.isdisjoint({"torch", "transformers"})
