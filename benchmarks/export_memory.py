"""Peak memory of an export of a random model of 3.3 billion weights, in a process of its own, beside what it must hold.

python benchmarks/export_memory.py [--folder DIR] [--target transformers] [--shard 1GB] [--json FILE]

Writes some 13 GB under DIR (a temporary folder unless given) and removes them.
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

from mla_convert.export.shards import ShardWriter, parse_size
from mla_convert.mla import MLAConfig, MLAForCausalLM

LAYERS, WIDTH, INNER, HEADS, NOPE, RANK, ROPE, VOCAB = 28, 3072, 8192, 24, 128, 448, 64, 128_256

_EXPORT = """
import json, sys
from pathlib import Path
from mla_convert.export.converted import open_converted
from mla_convert.export.exporting import export_model
from mla_convert.export.targets.target import ExportOptions
model, out, target, shard = sys.argv[1:]
def peak():  # of this program; what getrusage says would include that of the one that started it
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
before = peak()
export_model(open_converted(Path(model)), Path(out), target, ExportOptions(max_shard_size=shard), verify=False)
print(json.dumps({"before": before, "peak": peak()}))
"""


def config() -> MLAConfig:
    """Llama-3.2-3B's sizes at C + R = 512, tied, every slot at a frequency of the source's."""
    slots = [500_000.0 ** (-2 * pair / NOPE) for pair in range(0, NOPE // 2, NOPE // ROPE)]
    fields = {
        "architectures": [MLAForCausalLM.__name__],
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": NOPE,
        "rope_inv_freq": [slots] * LAYERS,
        "attention_scale": NOPE**-0.5,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    return MLAConfig(**fields)


def write_model(folder: Path) -> tuple[int, int, int]:
    """Write a random model tensor by tensor; return its parameters, and the bytes of its largest tensor and layer."""
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in MLAForCausalLM(config()).named_parameters()}
    parameters, layers = 0, dict.fromkeys(range(LAYERS), 0)
    with ShardWriter(folder, "1GB") as writer:
        for name, shape in shapes.items():
            if name == "lm_head.weight":
                continue
            writer.add(name, torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02))
            parameters += shape.numel()
            if name.startswith("model.layers."):
                layers[int(name.split(".")[2])] += 2 * shape.numel()
    config().save_pretrained(folder)
    return parameters, 2 * max(shape.numel() for shape in shapes.values()), max(layers.values())


def companions(folder: Path) -> None:
    """A tokenizer of two words and an empty record: the export copies them."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    record = {
        "source": {"ref": "random", "kind": "local", "revision": None, "attention": "GQA", "num_layers": LAYERS}
        | {"architecture": "LlamaForCausalLM", "num_heads": HEADS, "num_kv_heads": 8, "head_dim": NOPE},
        "tool": {"name": "mla-convert", "version": "0"},
        "format": "native",
        "dtype": "bfloat16",
        "recipe": {},
        "seeds": {},
        "calibration": None,
        "plan": {
            "layers": [{"kv_rank": RANK, "rope_dim": ROPE, "nope_dim": NOPE, "value_dim": NOPE}] * LAYERS,
            "cache": {
                "source_numbers_per_token": 2 * 8 * NOPE * LAYERS,
                "numbers_per_token": (RANK + ROPE) * LAYERS,
                "source_bytes_per_token": 4 * 8 * NOPE * LAYERS,
                "bytes_per_token": 2 * (RANK + ROPE) * LAYERS,
                "ratio": (RANK + ROPE) / (2 * 8 * NOPE),
            },
        },
        "measurements": [],
        "notes": [],
    }
    (folder / "conversion.json").write_text(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--target", default="transformers")
    parser.add_argument("--shard", default="1GB")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        model = Path(place) / "model"
        model.mkdir()
        parameters, tensor, layer = write_model(model)
        companions(model)
        start = time.perf_counter()
        command = [sys.executable, "-c", _EXPORT, str(model), str(Path(place) / "out"), arguments.target]
        run = subprocess.run([*command, arguments.shard], capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(run.stderr)
        memory = json.loads(run.stdout.strip().splitlines()[-1])
        seconds = time.perf_counter() - start
    result = {
        "target": arguments.target,
        "parameters": parameters,
        "shard_bytes": parse_size(arguments.shard),
        "tensor_bytes": tensor,
        "layer_bytes": layer,
        "imports_bytes": memory["before"],
        "peak_bytes": memory["peak"],
        "above_imports_over_tensor_plus_layer": (memory["peak"] - memory["before"]) / (tensor + layer),
        "seconds": seconds,
    }
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
