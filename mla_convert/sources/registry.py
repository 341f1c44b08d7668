"""The known families. Adding one is a file beside this one, a row here, and a subclass of the conformance tests."""

from __future__ import annotations

from mla_convert.sources.adapter import Adapter
from mla_convert.sources.gemma2 import Gemma2Adapter
from mla_convert.sources.gemma3 import Gemma3Adapter
from mla_convert.sources.llama import LlamaAdapter
from mla_convert.sources.mistral import MistralAdapter
from mla_convert.sources.olmo2 import Olmo2Adapter
from mla_convert.sources.phi3 import Phi3Adapter
from mla_convert.sources.qwen2 import Qwen2Adapter
from mla_convert.sources.qwen3 import Qwen3Adapter
from mla_convert.sources.refusals import unknown_architecture

ADAPTERS: tuple[type[Adapter], ...] = (
    LlamaAdapter,
    MistralAdapter,
    Qwen2Adapter,
    Qwen3Adapter,
    Phi3Adapter,
    Gemma2Adapter,
    Gemma3Adapter,
    Olmo2Adapter,
)


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
    raise unknown_architecture(architecture, known_architectures())
