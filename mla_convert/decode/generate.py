"""Continue prompts with a loaded model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_convert.decode.batch import Batch, pages_needed
from mla_convert.decode.paged import CacheDtype, CacheStatistics, PagedLatentCache
from mla_convert.decode.prompts import check_prompts
from mla_convert.decode.sampling import Sampling
from mla_convert.errors import UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generation:
    """A continuation.

    Attributes:
        text: the new tokens as text, special tokens left out.
        token_ids: the new tokens.
        prompt_tokens: how many tokens the prompt (with its chat template, if any) took.
        tokens_per_second: new tokens a second, the prefill's time included; in a batch, of this prompt alone.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    tokens_per_second: float


@dataclass(frozen=True)
class BatchGeneration:
    """The continuations of several prompts.

    Attributes:
        generations: in the prompts' order.
        tokens_per_second: new tokens of all prompts a second, the prefills' time included.
        cache: what the paged cache held; None for a model that has none.
    """

    generations: tuple[Generation, ...]
    tokens_per_second: float
    cache: CacheStatistics | None


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
    cache_dtype: CacheDtype = "auto",
    stream: Callable[[str], None] | None = None,
) -> Generation:
    """Return the model's continuation of ``prompt``: what :func:`generate_batch` returns for it alone.

    ``stream`` is called with pieces of text as they are ready.
    """
    batch = generate_batch(
        model,
        tokenizer,
        [prompt],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        chat=chat,
        cache_dtype=cache_dtype,
        stream=stream,
    )
    return batch.generations[0]


@torch.inference_mode()
def generate_batch(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float | None = None,
    seed: int = 0,
    chat: bool = False,
    batch_size: int = 64,
    cache: PagedLatentCache | None = None,
    cache_dtype: CacheDtype = "auto",
    stream: Callable[[str], None] | None = None,
    on_start: Callable[[], None] | None = None,
) -> BatchGeneration:
    """Return the model's continuations of ``prompts``: greedy at temperature 0, else sampled.

    What the checkpoint's generation_config says about sampling and repetition is not used, so that a command means the
    same for every model; its end-of-sequence tokens are. A native model prefills the prompts one by one, without
    padding, and decodes up to ``batch_size`` of them together on a paged cache, where what prompts begin with in common
    is stored and computed once. Other models go through transformers, one prompt after the other. What is sampled for
    a prompt depends on ``seed`` and its place in the list, not on the other prompts.

    Args:
        chat: wrap each prompt as a user's turn in the tokenizer's chat template.
        cache: use and keep this cache, whose beginnings of earlier calls are then shared too; by default one of the
            size that the prompts need is made. It computes in the model's dtype.
        cache_dtype: of the cache that is made; not with ``cache``, which has its own.
        stream: for one prompt alone: called with pieces of its text as they are ready.
        on_start: called when all is checked and the cache is there, before anything is computed.

    Raises:
        UsageError: an empty prompt, no chat template where one is asked for, more tokens than the model has positions,
            a cache that is not the model's, or an option out of range.
        CacheFullError: a prompt does not fit into ``cache``, or what the prompts need not into memory.
        KernelError: the model's decode backend cannot run on its device or with its sizes.
    """
    sampling = Sampling(temperature, top_p, seed)
    _check(prompts, max_new_tokens, batch_size, sampling, stream)
    encoded = [_encode(tokenizer, prompt, chat) for prompt in prompts]
    _check_positions(model, encoded, max_new_tokens)
    if not getattr(model, "supports_paged_cache", False):
        if cache is not None or cache_dtype != "auto":
            reason = getattr(model.config, "reason_against_paging", None)
            raise UsageError(
                f"{type(model).__name__} does not decode on a paged cache" + ("" if reason is None else f": {reason}"),
                "leave the cache's options out" + (", or convert with --format native" if reason is None else ""),
            )
        if on_start is not None:
            on_start()
        return _with_transformers(model, tokenizer, encoded, max_new_tokens, sampling, stream)
    if cache is None:
        pages = pages_needed(encoded, max_new_tokens, batch_size)
        cache = PagedLatentCache(model.config, pages, dtype=model.dtype, device=model.device, cache_dtype=cache_dtype)
    else:
        _check_cache(model, cache, cache_dtype)
    if model.attention_mode != "expanded" and model.decode_backend.name == "triton":
        cache.check_backend("triton", model.config.num_attention_heads)
    if on_start is not None:
        on_start()
    streamer = None if stream is None else _streamer(tokenizer, stream)
    if streamer is not None:
        streamer.put(torch.tensor(encoded[0]))
    started = time.perf_counter()
    done = Batch(
        model,
        cache,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        end_tokens=_end_tokens(model),
        batch_size=batch_size,
        on_token=None if streamer is None else lambda _, token: streamer.put(torch.tensor([token])),
    ).run(encoded)
    seconds = time.perf_counter() - started
    if streamer is not None:
        streamer.end()
    generations = [_generation(tokenizer, one.tokens, len(one.prompt), one.seconds) for one in done]
    batch = BatchGeneration(tuple(generations), sum(len(one.tokens) for one in done) / seconds, cache.statistics())
    log.info("%d prompts at %.1f new tokens a second; %s", len(prompts), batch.tokens_per_second, batch.cache)
    return batch


def _with_transformers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stream: Callable[[str], None] | None,
) -> BatchGeneration:
    # What is not given here would come from the checkpoint's generation_config.
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if not sampling.greedy:
        options = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p or 1.0,
            "top_k": 0,
        }
    generations, seconds = [], 0.0
    for index, prompt in enumerate(prompts):
        input_ids = torch.tensor([prompt], device=model.device)
        started = time.perf_counter()
        # transformers samples from torch's global generator: fork it, so that the caller's state is untouched.
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(sampling.prompt_seed(index))
            output = model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                **options,
                repetition_penalty=1.0,
                max_new_tokens=max_new_tokens,
                pad_token_id=_pad_token(model, tokenizer),
                streamer=None if stream is None else _streamer(tokenizer, stream),
            )
        took = time.perf_counter() - started
        seconds += took
        generations.append(_generation(tokenizer, output[0, len(prompt) :].tolist(), len(prompt), took))
    tokens = sum(len(generation.token_ids) for generation in generations)
    return BatchGeneration(tuple(generations), tokens / seconds, None)


def _generation(tokenizer: Any, token_ids: list[int], prompt_tokens: int, seconds: float) -> Generation:
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return Generation(text, tuple(token_ids), prompt_tokens, len(token_ids) / seconds)


def _check(
    prompts: Sequence[str],
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling,
    stream: Callable[[str], None] | None,
) -> None:
    check_prompts(prompts)
    if max_new_tokens < 1:
        raise UsageError(f"{max_new_tokens} new tokens is nothing to generate", "ask for at least 1 new token")
    if batch_size < 1:
        raise UsageError(f"a batch of {batch_size} prompts is none", "decode at least 1 prompt at once")
    if stream is not None and len(prompts) > 1:
        raise UsageError(f"the texts of {len(prompts)} prompts cannot be streamed as one", "stream one prompt")
    sampling.check()


def _check_positions(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raise UsageError where a prompt and its new tokens need more positions than the model has."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(len(prompt) for prompt in prompts)
    if limit is None or longest + max_new_tokens <= limit:
        return
    room = limit - longest
    raise UsageError(
        f"a prompt of {longest} tokens and {max_new_tokens} new ones are more than the {limit} positions of the model "
        "(max_position_embeddings)",
        f"ask for at most {room} new tokens" if room > 0 else f"give prompts of less than {limit} tokens",
    )


def _check_cache(model: Any, cache: PagedLatentCache, cache_dtype: CacheDtype) -> None:
    """Raise UsageError for a cache that is not of the model's dtype, or a dtype asked of it."""
    if cache_dtype != "auto":
        raise UsageError(
            f"a cache dtype of {cache_dtype} cannot be asked of a cache that is given",
            "leave cache_dtype out, or make the cache with it",
        )
    if cache.dtype != model.dtype:
        raise UsageError(
            f"the cache is for {cache.dtype}, and the model computes in {model.dtype}",
            "make the cache with dtype=model.dtype",
        )


def _encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if not chat:
        encoded = tokenizer(prompt)
    elif getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    else:
        raise UsageError("the tokenizer has no chat template", "generate without the chat template")
    if not encoded["input_ids"]:
        raise UsageError("the prompt has no tokens", "give a prompt with some text")
    return list(encoded["input_ids"])


def _end_tokens(model: Any) -> frozenset[int]:
    end = model.generation_config.eos_token_id
    if end is None:
        return frozenset()
    return frozenset(end) if isinstance(end, (list, tuple)) else frozenset({end})


def _pad_token(model: Any, tokenizer: Any) -> int | None:
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    return min(_end_tokens(model), default=None)


def _streamer(tokenizer: Any, stream: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class CallbackStreamer(TextStreamer):
        """Hands finished text to the caller where TextStreamer prints it."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                stream(text)

    return CallbackStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
