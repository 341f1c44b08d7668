"""Continue a prompt with a loaded model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mla_convert.errors import UsageError


@dataclass(frozen=True)
class Generation:
    """A continuation.

    Attributes:
        text: the new tokens as text, special tokens left out.
        token_ids: the new tokens.
        prompt_tokens: how many tokens the prompt (with its chat template, if any) took.
        tokens_per_second: new tokens a second, the prefill's time included.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    tokens_per_second: float


@torch.inference_mode()
def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float | None = None,
    seed: int = 0,
    chat: bool = False,
    stream: Callable[[str], None] | None = None,
) -> Generation:
    """Return the model's continuation of ``prompt``: greedy at temperature 0, else sampled with ``seed``.

    What the checkpoint's generation_config says about sampling is not used, so that a command means the same for every
    model; its end-of-sequence tokens are. ``chat`` wraps the prompt as a user's turn in the tokenizer's chat template.
    ``stream`` is called with pieces of text as they are ready.

    Raises:
        UsageError: an empty prompt, no chat template where one is asked for, or an option out of range.
    """
    _check(prompt, max_new_tokens, temperature, top_p)
    inputs = _encode(tokenizer, prompt, chat).to(model.device)
    prompt_tokens = inputs["input_ids"].shape[1]
    if prompt_tokens == 0:
        raise UsageError("the prompt has no tokens", "give a prompt with some text")
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_p": top_p or 1.0, "top_k": 0}
    started = time.perf_counter()
    # transformers samples from torch's global generator: fork it, so that the caller's state is untouched.
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        output = model.generate(
            **inputs,
            **options,
            max_new_tokens=max_new_tokens,
            pad_token_id=_pad_token(model, tokenizer),
            streamer=None if stream is None else _streamer(tokenizer, stream),
        )
    seconds = time.perf_counter() - started
    token_ids = tuple(output[0, prompt_tokens:].tolist())
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return Generation(text, token_ids, prompt_tokens, len(token_ids) / seconds)


def _check(prompt: str, max_new_tokens: int, temperature: float, top_p: float | None) -> None:
    if not prompt:
        raise UsageError("the prompt is empty", "give a prompt with some text")
    if max_new_tokens < 1:
        raise UsageError(f"{max_new_tokens} new tokens is nothing to generate", "ask for at least 1 new token")
    if temperature < 0:
        raise UsageError(f"a temperature of {temperature} is below 0", "give 0 for greedy decoding, or more to sample")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"a top-p of {top_p} is not in (0, 1]", "give a top-p above 0 and at most 1")
    if top_p is not None and temperature == 0:
        raise UsageError("top-p without a temperature changes nothing", "give a temperature above 0 as well")


def _encode(tokenizer: Any, prompt: str, chat: bool) -> Any:
    if not chat:
        encoded = tokenizer(prompt, return_tensors="pt")
    elif getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        raise UsageError("the tokenizer has no chat template", "generate without the chat template")
    # Some tokenizers add token_type_ids, which decoder models refuse.
    encoded.pop("token_type_ids", None)
    return encoded


def _pad_token(model: Any, tokenizer: Any) -> int | None:
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    end = model.generation_config.eos_token_id
    return end[0] if isinstance(end, list) else end


def _streamer(tokenizer: Any, stream: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class CallbackStreamer(TextStreamer):
        """Hands finished text to the caller where TextStreamer prints it."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                stream(text)

    return CallbackStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
