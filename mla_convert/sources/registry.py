"""The known families. Adding one is a file beside this one, a row here, and a subclass of the conformance tests."""

from __future__ import annotations

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.sources.adapter import Adapter
from mla_convert.sources.llama import LlamaAdapter
from mla_convert.sources.mistral import MistralAdapter
from mla_convert.sources.qwen2 import Qwen2Adapter

ADAPTERS: tuple[type[Adapter], ...] = (LlamaAdapter, MistralAdapter, Qwen2Adapter)


def known_architectures() -> tuple[str, ...]:
    """The entries of ``config.json``'s ``architectures`` that have an adapter."""
    return tuple(adapter.architecture for adapter in ADAPTERS)


def adapter_for(architecture: str) -> Adapter:
    """The adapter of ``architecture``.

    Raises:
        UnsupportedArchitectureError: there is none.
    """
    for adapter in ADAPTERS:
        if adapter.architecture == architecture:
            return adapter()
    raise UnsupportedArchitectureError(
        f"no source adapter for '{architecture}'",
        f"use one of {', '.join(known_architectures())}; docs/add-a-model.md shows how to add one",
    )
