"""Peak memory and time of converting a random Llama of 3 billion parameters a layer at a time, forward-only.

python benchmarks/large_model.py [--folder DIR] [--tokens 4096] [--recipe forward] [--json FILE]

Writes some 20 GB under DIR (a temporary folder unless given) and removes them. The conversion runs in a process of its
own. What a larger model takes follows from its own layer: memory and time grow with its weights, time with the tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mla_convert.export.shards import ShardWriter
from mla_convert.sources import open_source

LAYERS, WIDTH, INNER, HEADS, GROUPS, DIM = 28, 3072, 8192, 24, 8, 128

_CONVERT = """
import json, sys, time
from pathlib import Path
from mla_convert.pipeline import ConvertRequest, convert
source, out, tokens, recipe = sys.argv[1:]
def peak():  # of this program; what getrusage says would include that of the one that started it
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
before, start = peak(), time.perf_counter()
record = convert(
    ConvertRequest(source=source, out=Path(out), recipe=recipe, cache=0.5, calibration_tokens=int(tokens),
                   dtype="bfloat16", low_memory=True)
)
seconds = time.perf_counter() - start
print(json.dumps({"before": before, "peak": peak(), "seconds": seconds, "timings": record["timings"]}))
"""


def write_model(folder: Path) -> int:
    """Write a random Llama of Llama-3.2-3B's layer sizes, float32, tensor by tensor; return its parameters."""
    tokenizer = open_source("builtin:smollm2-135m").load_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=DIM,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    with ShardWriter(folder, "1GB") as writer:
        for name, shape in shapes.items():
            if len(shape) == 1:
                value = torch.ones(shape)
            else:
                value = torch.empty(shape).normal_(std=shape[1] ** -0.5, generator=generator)
            writer.add(name, value)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(shape.numel() for name, shape in shapes.items() if name != "lm_head.weight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--recipe", default="forward")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        source, out = Path(place) / "source", Path(place) / "out"
        source.mkdir()
        start = time.perf_counter()
        parameters = write_model(source)
        made = time.perf_counter() - start
        stored = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        command = [sys.executable, "-c", _CONVERT, str(source), str(out), str(arguments.tokens), arguments.recipe]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(run.stderr)
        found = json.loads(run.stdout.strip().splitlines()[-1])
        written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    result = {
        "parameters": parameters,
        "source_bytes": stored,
        "written_bytes": written,
        "tokens": arguments.tokens,
        "recipe": arguments.recipe,
        "threads": torch.get_num_threads(),
        "made_seconds": made,
        "imports_bytes": found["before"],
        "peak_bytes": found["peak"],
        "seconds": found["seconds"],
        "seconds_a_layer": {name: seconds / LAYERS for name, seconds in found["timings"].items()},
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
