"""Stage 10: absorbed decoding and generation."""

from mla_convert.decode.absorbed import ABSORBED_FILE, AbsorbedSummary, attach_absorbed, save_absorbed
from mla_convert.decode.blocks import BlockAllocator
from mla_convert.decode.generate import BatchGeneration, Generation, generate, generate_batch
from mla_convert.decode.paged import CachedSequence, CacheStatistics, PagedLatentCache
from mla_convert.decode.prompts import check_prompts, read_prompts
from mla_convert.decode.sampling import Sampling

__all__ = [
    "ABSORBED_FILE",
    "AbsorbedSummary",
    "BatchGeneration",
    "BlockAllocator",
    "CacheStatistics",
    "CachedSequence",
    "Generation",
    "PagedLatentCache",
    "Sampling",
    "attach_absorbed",
    "check_prompts",
    "generate",
    "generate_batch",
    "read_prompts",
    "save_absorbed",
]
