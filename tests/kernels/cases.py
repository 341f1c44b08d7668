"""Decode problems whose every unused byte is poisoned, and the comparison with the float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_kernels import mla_decode, quantize_latent, reference_decode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A block table's unused entries: as an address it is far outside any cache, as FlashMLA's own tests have it.
NO_PAGE = 2147480000


@dataclass(frozen=True)
class Case:
    """Arguments of `mla_decode`, on DEVICE."""

    q: Tensor
    kv_cache: Tensor
    block_table: Tensor | None
    lengths: Tensor
    rank: int
    scale: float

    def run(self, **options) -> tuple[Tensor, Tensor]:
        return mla_decode(self.q, self.kv_cache, self.block_table, self.lengths, self.rank, self.scale, **options)

    def expected(self, **options) -> tuple[Tensor, Tensor]:
        return reference_decode(self.q, self.kv_cache, self.block_table, self.lengths, self.rank, self.scale, **options)


def make_case(
    rank: int,
    rope_dim: int,
    heads: int,
    lengths: Sequence[int],
    *,
    queries: int = 1,
    dtype: torch.dtype = torch.float32,
    page: int | None = 64,
    fp8: bool = False,
    seed: int = 0,
) -> Case:
    """Return a problem with permuted pages (or a contiguous cache for page None) and NaN wherever nothing is cached."""
    generator = torch.Generator().manual_seed(seed)
    batch, width = len(lengths), rank + rope_dim
    q = torch.randn(batch, queries, heads, width, generator=generator).to(dtype)
    size = page or max(*lengths, 1)
    per_sequence = -(-max(*lengths, 1) // size)
    pages = batch * per_sequence + (3 if page else 0)
    cache = torch.randn(pages, size, width, generator=generator)
    order = torch.randperm(pages, generator=generator) if page else torch.arange(pages)
    table = order[: batch * per_sequence].view(batch, per_sequence).to(torch.int32)
    rows = quantize_latent(cache, rank) if fp8 else cache.to(dtype)
    used = torch.zeros(pages, size, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for i in range(-(-length // size)):
            used[table[b, i], : min(length - i * size, size)] = True
        table[b, -(-length // size) :] = NO_PAGE
    # 0xFF is NaN as an e4m3 code, as a float32 scale and as a bfloat16 RoPE channel.
    rows = rows.masked_fill(~used[..., None], 255 if fp8 else float("nan"))
    return Case(
        q.to(DEVICE),
        rows.to(DEVICE),
        table.to(DEVICE) if page else None,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        rank,
        # Not (c+r)^-1/2 on purpose: the scale is the caller's.
        0.8 * width**-0.5,
    )


def assert_matches(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], relative: float) -> None:
    """Compare output and LSE by relative error in norm, by the largest error, and by cosine; empty rows exactly.

    The LSE is computed in float32 from products of the inputs' own dtype, which are exact, so it has float32's error.
    """
    (out, lse), (ref_out, ref_lse) = got, want
    out, lse = out.double().cpu(), lse.double().cpu()
    ref_out, ref_lse = ref_out.double().cpu(), ref_lse.double().cpu()
    assert out.shape == ref_out.shape
    assert lse.shape == ref_lse.shape
    empty = ref_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not out.isnan().any()
    assert not out[empty.transpose(1, 2)].any()
    if empty.all():
        return
    assert (lse - ref_lse)[~empty].abs().amax() <= 1e-5
    assert (out - ref_out).norm() <= relative * ref_out.norm()
    assert (out - ref_out).abs().amax() <= 4 * relative * ref_out.abs().amax()
    assert torch.nn.functional.cosine_similarity(out.flatten(), ref_out.flatten(), dim=0) >= 1 - relative
