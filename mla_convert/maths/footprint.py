"""What a token costs in the cache, as arithmetic: numbers held per token per layer by each kind of attention.

DeepSeek-V2 (arXiv 2405.04434), Table 1: MHA holds 2·H·K numbers, GQA 2·G·K, MQA 2·K and MLA C + R.
Imports no torch: a plan is made from these numbers before any weight is read.
"""

from __future__ import annotations


def mha_elements(num_heads: int, head_dim: int) -> int:
    """Return 2·H·K: a key and a value for every query head."""
    return gqa_elements(num_heads, head_dim)


def gqa_elements(num_kv_heads: int, head_dim: int) -> int:
    """Return 2·G·K: a key and a value for every group of query heads."""
    return 2 * num_kv_heads * head_dim


def mqa_elements(head_dim: int) -> int:
    """Return 2·K: one key and one value shared by all query heads."""
    return gqa_elements(1, head_dim)


def mla_elements(kv_rank: int, rope_dim: int) -> int:
    """Return C + R: one latent and one rotated key shared by all query heads."""
    return kv_rank + rope_dim


def element_bytes(elements: int, element_size: int) -> int:
    """Return the bytes that ``elements`` numbers of ``element_size`` bytes each take."""
    return elements * element_size


def relative_change(elements: int, baseline: int) -> float:
    """Return ``elements / baseline − 1``: negative where less is cached than by the baseline."""
    return elements / baseline - 1.0
