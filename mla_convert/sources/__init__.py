"""Stage 1: lazy reading of source checkpoints, with one adapter per model family."""

from mla_convert.sources.attention import AttentionWeights
from mla_convert.sources.opening import open_source
from mla_convert.sources.registry import known_architectures
from mla_convert.sources.roles import Converted, Copied, Dropped, Part, Role
from mla_convert.sources.source import Source

__all__ = [
    "AttentionWeights",
    "Converted",
    "Copied",
    "Dropped",
    "Part",
    "Role",
    "Source",
    "known_architectures",
    "open_source",
]
