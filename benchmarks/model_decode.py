"""Tokens a second of a whole model on the CPU: the source's own cached decode and the converted model's.

The caches are filled with small random numbers instead of by a prompt: how long a step takes does not depend on what
is cached. Then every decoder continues greedily, in turns of some tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Spread, cpu_clock, interleaved, ratio

SOURCE, SOURCE_STATIC = "source, DynamicCache", "source, StaticCache"
CONVERTED, CONVERTED_PAGED = "converted, DynamicCache", "converted, paged cache"
# Numbers of this size leave the attention flat, without the denormals that a peaked softmax would make.
FILL_SCALE = 0.05


def measure_models(
    source: Any, converted: Any, contexts: tuple[int, ...], threads: int, rounds: int, tokens_a_turn: int
) -> Iterator[dict[str, Any]]:
    """Yield one result for every context: tokens a second of each decoder, and ratios to the source's own decode."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for context in contexts:
            yield _measure(source, converted, context, threads, rounds, tokens_a_turn)
    finally:
        torch.set_num_threads(before)


def load_models(source: str, converted: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the source model and the converted one with its absorbed matrices, where the folder has them."""
    from mla_convert.decode import attach_absorbed
    from mla_convert.evaluate import load_for_evaluation

    source_model, _ = load_for_evaluation(source, dtype)
    converted_model, _ = load_for_evaluation(str(converted), dtype)
    attach_absorbed(converted_model, converted)
    return source_model, converted_model


@torch.inference_mode()
def _measure(
    source: Any, converted: Any, context: int, threads: int, rounds: int, tokens_a_turn: int
) -> dict[str, Any]:
    room = context + (rounds + 1) * tokens_a_turn
    calls = {
        SOURCE: _decoder(source, _dynamic_cache(source, context), tokens_a_turn),
        SOURCE_STATIC: _decoder(source, _static_cache(source, context, room), tokens_a_turn),
        CONVERTED: _decoder(converted, _dynamic_cache(converted, context), tokens_a_turn),
        CONVERTED_PAGED: _paged_decoder(converted, context, room, tokens_a_turn),
    }
    clock, clock_name = cpu_clock(threads)
    seconds = interleaved(calls, rounds, clock)
    return {
        "context": context,
        "threads": threads,
        "rounds": rounds,
        "tokens_a_turn": tokens_a_turn,
        "dtype": str(source.dtype).removeprefix("torch."),
        "clock": clock_name,
        "tokens_per_second": {
            name: Spread.of([tokens_a_turn / sample for sample in samples]).scaled(1)
            for name, samples in seconds.items()
        },
        "speedup_over_source": {name: ratio(seconds, SOURCE, name).scaled(1) for name in seconds if name != SOURCE},
        "cache_bytes_a_token": {"source": _numbers(source) * 4, "converted": _numbers(converted) * 4},
    }


def _decoder(model: Any, cache: Any, tokens: int) -> Callable[[], None]:
    """Return a call that decodes ``tokens`` tokens greedily, each from the one before."""
    parameters = inspect.signature(model.forward).parameters
    cache_argument = {"cache" if "cache" in parameters else "past_key_values": cache}
    last = torch.tensor([[1]])

    def turn() -> None:
        nonlocal last
        for _ in range(tokens):
            last = model(input_ids=last, use_cache=True, **cache_argument).logits[:, -1:].argmax(-1)

    return turn


def _paged_decoder(model: Any, context: int, room: int, tokens: int) -> Callable[[], None]:
    """The same on a paged cache, which attends by itself and copies nothing when it grows."""
    from mla_convert.decode import PagedLatentCache
    from mla_convert.decode.blocks import PAGE_TOKENS

    cache = PagedLatentCache(model.config, -(-room // PAGE_TOKENS), dtype=model.dtype)
    sequence = cache.open([1])
    with cache.prefilling(sequence, [1] * context) as prefilling:
        _filled(prefilling, model, context)
    last = 1

    def turn() -> None:
        nonlocal last
        for _ in range(tokens):
            positions = torch.tensor([[len(sequence.tokens)]])
            with cache.decoding([sequence], [[last]]) as step:
                logits = model(torch.tensor([[last]]), position_ids=positions, cache=step, use_cache=True).logits
            last = int(logits[0, -1].argmax())

    return turn


def _dynamic_cache(model: Any, context: int) -> Any:
    from transformers import DynamicCache

    return _filled(DynamicCache(config=model.config), model, context)


def _static_cache(model: Any, context: int, room: int) -> Any:
    from transformers import StaticCache

    return _filled(StaticCache(config=model.config, max_cache_len=room), model, context)


def _filled(cache: Any, model: Any, context: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    for layer in range(model.config.num_hidden_layers):
        heads, *widths = _cached_shape(model, layer)
        rows = (torch.randn(1, heads, context, width, generator=generator) * FILL_SCALE for width in widths)
        cache.update(*(part.to(model.dtype) for part in rows), layer)
    return cache


def _cached_shape(model: Any, layer: int) -> tuple[int, int, int]:
    """KV heads and the widths of the two tensors that a layer caches: K and V, or the latent and its RoPE part."""
    config = model.config
    if hasattr(config, "kv_lora_rank"):
        return 1, config.kv_rank_of(layer), config.rope_dim_of(layer)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, head_dim, head_dim


def _numbers(model: Any) -> int:
    shapes = [_cached_shape(model, layer) for layer in range(model.config.num_hidden_layers)]
    return sum(heads * (first + second) for heads, first, second in shapes)
