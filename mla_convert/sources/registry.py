"""The known families. Adding one is a file beside this one, a row here, and a subclass of the conformance tests."""

from __future__ import annotations

from mla_convert.sources.adapter import Adapter
from mla_convert.sources.bloom import BloomAdapter
from mla_convert.sources.cohere import CohereAdapter
from mla_convert.sources.falcon import FalconAdapter
from mla_convert.sources.gemma import GemmaAdapter
from mla_convert.sources.gemma2 import Gemma2Adapter
from mla_convert.sources.gemma3 import Gemma3Adapter
from mla_convert.sources.gpt2 import GPT2Adapter
from mla_convert.sources.gpt_neox import GPTNeoXAdapter
from mla_convert.sources.granite import GraniteAdapter
from mla_convert.sources.llama import LlamaAdapter
from mla_convert.sources.mistral import MistralAdapter
from mla_convert.sources.mixtral import MixtralAdapter
from mla_convert.sources.mpt import MosaicMptAdapter, MptAdapter
from mla_convert.sources.olmo2 import Olmo2Adapter
from mla_convert.sources.phi3 import Phi3Adapter
from mla_convert.sources.qwen2 import Qwen2Adapter
from mla_convert.sources.qwen2_moe import Qwen2MoeAdapter
from mla_convert.sources.qwen3 import Qwen3Adapter
from mla_convert.sources.qwen3_moe import Qwen3MoeAdapter
from mla_convert.sources.refusals import unknown_architecture
from mla_convert.sources.stablelm import StableLmAdapter
from mla_convert.sources.starcoder2 import Starcoder2Adapter

ADAPTERS: tuple[type[Adapter], ...] = (
    LlamaAdapter,
    MistralAdapter,
    Qwen2Adapter,
    Qwen3Adapter,
    Phi3Adapter,
    GemmaAdapter,
    Gemma2Adapter,
    Gemma3Adapter,
    Olmo2Adapter,
    MixtralAdapter,
    Qwen2MoeAdapter,
    Qwen3MoeAdapter,
    GraniteAdapter,
    CohereAdapter,
    Starcoder2Adapter,
    StableLmAdapter,
    GPTNeoXAdapter,
    FalconAdapter,
    GPT2Adapter,
    BloomAdapter,
    MptAdapter,
    MosaicMptAdapter,
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
