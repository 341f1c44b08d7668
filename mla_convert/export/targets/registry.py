"""Every target by name: the one place where a new one is listed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mla_convert.errors import UsageError
from mla_convert.export.targets.gguf import GGUF
from mla_convert.export.targets.sglang import SGLANG
from mla_convert.export.targets.target import Target
from mla_convert.export.targets.transformers import TRANSFORMERS
from mla_convert.export.targets.vllm import VLLM

TARGETS: Mapping[str, Target] = MappingProxyType({target.name: target for target in (TRANSFORMERS, VLLM, SGLANG, GGUF)})


def target_named(name: str) -> Target:
    """Return the target of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in TARGETS:
        raise UsageError(f"there is no export target {name!r}", f"one of {', '.join(TARGETS)}")
    return TARGETS[name]
