"""Bytes that a model's cache really holds a token, measured on the cache object after a prefill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mla_convert.errors import UsageError


@torch.inference_mode()
def cache_bytes_per_token(model: Any, *, lengths: tuple[int, int] = (16, 48)) -> float:
    """Return the bytes, over all layers, by which the cache grows a token of one sequence.

    Two prefills of different lengths are run, and the difference of the bytes held is divided by that of the tokens,
    so that what a cache holds whatever its length does not count. With sliding windows shorter than ``lengths`` the
    layers concerned have stopped growing.

    Raises:
        UsageError: the model returns no cache, or the lengths are equal.
    """
    short, long = lengths
    if short == long:
        raise UsageError(f"two prefills of {short} tokens show no growth", "give two different lengths")
    return (held_bytes(prefill(model, long)) - held_bytes(prefill(model, short))) / (long - short)


@torch.inference_mode()
def prefill(model: Any, tokens: int) -> Any:
    """Return the model's cache after a prefill of ``tokens`` tokens of one sequence.

    Raises:
        UsageError: the model returns no cache.
    """
    input_ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    outputs = model(input_ids=input_ids, use_cache=True, logits_to_keep=1)
    # transformers renamed the field from `past_key_values` to `cache`.
    cache = getattr(outputs, "cache", None)
    cache = cache if cache is not None else getattr(outputs, "past_key_values", None)
    if cache is None:
        raise UsageError(f"{type(model).__name__} returns no cache", "measure a model that caches")
    return cache


def held_bytes(cache: Any) -> int:
    """Return the bytes of storage that the tensors in a cache object keep alive, each storage counted once.

    Storage counts whole: a view keeps all of what it looks into, and an expanded tensor holds only what is stored.
    """
    storages: dict[tuple[torch.device, int], int] = {}
    for tensor in _tensors(cache, set()):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield every tensor reachable from ``value`` through attributes and containers, but no model's weights."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, (str, bytes, type, nn.Module)):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = list(value)
    else:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        children = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    for child in children:
        yield from _tensors(child, seen)
