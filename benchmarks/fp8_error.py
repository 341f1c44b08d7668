"""Measure what an fp8 latent cache costs a converted model, against a bfloat16 cache and one scale for a tensor.

    python benchmarks/fp8_error.py MODEL [--text TEXT] [--contexts N] [--json FILE]

Every layer's latents are stored and read back in the format before they are attended to; the RoPE part is rounded to
bfloat16 in each. Reported are the relative error of the latents, KL(exact || rounded) a token, and ln of the perplexity
over that with an exact cache. The model itself computes in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
for place in (ROOT, ROOT / "kernels"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

from mla_convert.calibrate.text import read_text, windows  # noqa: E402
from mla_convert.evaluate import load_for_evaluation  # noqa: E402
from mla_kernels import dequantize_latent, quantize_latent  # noqa: E402

# Store = Callable[[rows [T, C+R], rank], rows as they are read back]
Store = Callable[[Tensor, int], Tensor]
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def bfloat16(rows: Tensor, rank: int) -> Tensor:
    """Return the rows as a bfloat16 cache returns them."""
    return rows.bfloat16().float()


def fp8(rows: Tensor, rank: int) -> Tensor:
    """Return the rows as `quantize_latent` stores them: a scale for each token and 128 channels."""
    return dequantize_latent(quantize_latent(rows, rank), rank, rows.shape[-1] - rank, torch.float32)


def fp8_tensor(rows: Tensor, rank: int) -> Tensor:
    """Return the rows with one scale for the latents of all tokens of the layer, as engines' fp8 caches have."""
    latent = rows[:, :rank]
    scale = latent.abs().amax() / LARGEST
    stored = (latent / scale).to(torch.float8_e4m3fn).float() * scale
    return torch.cat([stored, bfloat16(rows[:, rank:], 0)], dim=-1)


FORMATS: dict[str, Store] = {
    "bfloat16": bfloat16,
    "fp8, scale per token and 128 channels": fp8,
    "fp8, one scale": fp8_tensor,
}


@torch.inference_mode()
def measure(model: Any, contexts: Tensor) -> dict[str, dict[str, float]]:
    """Return each format's errors on ``contexts`` [n L]."""
    exact = [_log_probabilities(model, context) for context in contexts]
    results = {}
    for name, store in FORMATS.items():
        errors: list[float] = []
        handles = [
            layer.self_attn.kv_a_proj_with_mqa.register_forward_hook(_hook(store, layer.self_attn.kv_lora_rank, errors))
            for layer in model.model.layers
        ]
        divergence = growth = 0.0
        for context, log_p in zip(contexts, exact, strict=True):
            log_q = _log_probabilities(model, context)
            divergence += (log_p.exp() * (log_p - log_q)).sum(-1)[:-1].mean().item()
            target = context[1:, None]
            growth += (log_p[:-1].gather(1, target) - log_q[:-1].gather(1, target)).mean().item()
        for handle in handles:
            handle.remove()
        results[name] = {
            "latent_relative_error": math.sqrt(sum(error**2 for error in errors) / len(errors)),
            "kl": divergence / len(contexts),
            "ln_perplexity_ratio": growth / len(contexts),
        }
    return results


def _log_probabilities(model: Any, context: Tensor) -> Tensor:
    return model(input_ids=context[None], use_cache=False).logits[0].double().log_softmax(-1)


def _hook(store: Store, rank: int, errors: list[float]) -> Callable[..., Tensor]:
    def replaced(_module: Any, _inputs: Any, rows: Tensor) -> Tensor:
        flat = rows.flatten(0, -2)
        kept = store(flat, rank)
        errors.append(((kept - flat)[:, :rank].norm() / flat[:, :rank].norm()).item())
        return kept.view_as(rows)

    return replaced


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description="Measure what an fp8 latent cache costs a converted model.")
    parser.add_argument("model", help="a folder that `mla-convert convert` wrote, native format")
    parser.add_argument("--text", default="builtin:pydoc", help="what is scored (default: %(default)s)")
    parser.add_argument("--contexts", type=int, default=8, metavar="N", help="contexts of 512 tokens (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(arguments)
    model, tokenizer = load_for_evaluation(options.model, torch.float32)
    text = read_text(options.text)
    contexts = windows(tokenizer, text.text, context=512, max_tokens=512 * options.contexts)
    results = measure(model, contexts)
    print("| cache | error of the latents | KL a token | ln(PPL / PPL exact) |\n|---|---|---|---|")
    for name, found in results.items():
        print(
            f"| {name} | {found['latent_relative_error']:.2e} | {found['kl']:.2e} | "
            f"{found['ln_perplexity_ratio']:+.2e} |"
        )
    if options.json:
        options.json.write_text(json.dumps({"contexts": len(contexts), "formats": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
