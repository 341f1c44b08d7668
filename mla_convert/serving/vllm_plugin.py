"""vLLM's plugin: with this package in vLLM's environment, exports load there without remote code.

vLLM finds it by the entry point of group ``vllm.general_plugins`` and calls it in each of its processes.
"""

from __future__ import annotations

ARCHITECTURE = "DeepseekMLAForCausalLM"

# By name, so that vLLM imports it when a model needs it. It runs the class that transformers knows for the config.
_BACKEND = "vllm.model_executor.models.transformers:TransformersForCausalLM"


def register() -> None:
    """Make the exported class known to transformers and to vLLM; may be called again."""
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]

    import mla_convert.mla  # noqa: F401 - registers the classes with transformers

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, _BACKEND)
