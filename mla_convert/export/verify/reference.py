"""What an export has to answer: the probe, the converted model's answers to it, and the tolerance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

import mla_convert.mla  # noqa: F401 - registers the native classes with transformers
from mla_convert.errors import SourceError
from mla_convert.export.verify.answers import Answers, Difference, Probe, compare_answers

EXACT = 1e-4
"""The largest |Δ log p| of an export in float32, nats: float32 rounding in a deep model reaches half of it."""

# What is written may be off by this many times what rounding the weights once more does to the same answers.
ROUNDINGS = 3.0

_Q8_BLOCK = 32
# Rounded at a scale that is no power of two, even weights that are stored in the same dtype are rounded anew.
_OTHER_SCALE = 1.2


def make_probe(tokenizer: Any, text: str, *, positions: int, tokens: int = 128) -> Probe:
    """Return a probe from the start of ``text``: up to 128 tokens to read and 64 to write, as far as positions allow.

    Args:
        positions: the context of what is asked. It may be longer than a sliding window: engines have to be right there.
    """
    new_tokens = max(1, min(64, positions // 3))
    length = max(2, min(tokens, positions - new_tokens))
    ids = tokenizer(text[: length * 32], add_special_tokens=False)["input_ids"][:length]
    return Probe(tuple(int(token) for token in ids), new_tokens)


@torch.no_grad()
def model_answers(model: Any, probe: Probe) -> Answers:
    """Return what a transformers model in memory answers. The model forgets its generation config."""
    ids = torch.tensor([probe.prompt])
    distributions = model(ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    given = distributions.gather(1, ids[0, 1:, None])[:, 0]
    model.generation_config = GenerationConfig()  # which knows no token that ends a text
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=probe.new_tokens, do_sample=False, pad_token_id=0
    )
    return Answers(given, tuple(written[0, ids.shape[1] :].tolist()), distributions)


def reference_answers(folder: Path, probe: Probe, stored_as: str) -> tuple[Answers, float]:
    """Return the converted model's answers in float32, and the mean |Δ log p| allowed of an export.

    The weights are taken as they are stored. An export in float32 may differ by :data:`EXACT`; one in another dtype by
    three times what rounding every matrix once to that dtype does to the answers of this model.

    Raises:
        SourceError: the folder cannot be loaded, or what it answers is not finite.
    """
    model = _load(folder)
    answers = model_answers(model, probe)
    if not bool(answers.logprobs.isfinite().all()):
        raise SourceError(
            f"{folder} answers with numbers that are not finite: its weights are damaged", "convert the model again"
        )
    if stored_as == "float32":
        return answers, EXACT
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data = rounded(module.weight.data, stored_as)
    difference = compare_answers(model_answers(model, probe), answers)
    return answers, max(EXACT, ROUNDINGS * difference.mean_logprob_difference)


def passes(difference: Difference, tolerance: float, stored_as: str) -> bool:
    """Whether an engine's answers are the model's: in float32 every one and the whole continuation, else on average."""
    if stored_as == "float32":
        whole = difference.agreed == difference.continuation
        return whole and difference.max_logprob_difference <= tolerance
    return difference.mean_logprob_difference <= tolerance


def rounded(weight: Float[Tensor, "rows columns"], stored_as: str) -> Float[Tensor, "rows columns"]:
    """Return a float32 matrix after one rounding to ``bfloat16``, ``float16`` or ``q8_0`` (blocks of 32, one scale)."""
    if stored_as != "q8_0":
        return (weight * _OTHER_SCALE).to(getattr(torch, stored_as)).float() / _OTHER_SCALE
    columns = weight.shape[-1]
    blocks = nn.functional.pad(weight, (0, -columns % _Q8_BLOCK)).unflatten(-1, (-1, _Q8_BLOCK))
    step = blocks.abs().amax(dim=-1, keepdim=True).half().float().clamp_min(1e-12) / 127
    return ((blocks / step).round() * step).flatten(-2)[..., :columns]


def _load(folder: Path) -> Any:
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    except Exception as error:  # safetensors and transformers raise errors of no common kind
        said = " ".join(str(error).split()) or type(error).__name__
        raise SourceError(f"{folder} cannot be loaded: {said}", "convert the model again") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
