"""One converted layer, in DeepSeek-V2's symbols."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mla_convert.spec import MLAShape


@dataclass(frozen=True)
class MLAWeights:
    """The attention of one layer as MLA (DeepSeek-V2, section 2.1.2), queries uncompressed.

    With x [D] the layer's normalised input: c_kv = w_dkv x + b_dkv, k_rope = RoPE(w_kr x + b_kr), head i scores
    (w_uq_i x + b_uq_i)·(w_uk_i c_kv) + RoPE(w_qr_i x + b_qr_i)·k_rope, times the source's softmax scale, and reads
    w_uv_i c_kv. The R rotary dims are R/2 real parts, then R/2 imaginary parts (rotate-half order).

    Where the source normalises queries and keys, the query maps w_uq and w_qr act on what the norm makes of
    w_qa x + b_qa, each norm's block divided by its root mean square, and a head's score of a token is divided by the
    root mean square of that token's w_kn x + b_kn, in the block of the head's norm.

    Attributes:
        inv_freq: the R/2 angular frequencies of the slots, radians a position.
        pairs: which of the source's rotary pairs each slot turns with; None where that is not known.
    """

    w_dkv: Float[Tensor, "C D"]
    w_kr: Float[Tensor, "R D"]
    w_uk: Float[Tensor, "H N C"]
    w_uv: Float[Tensor, "H V C"]
    w_uq: Float[Tensor, "H N Q"]
    w_qr: Float[Tensor, "H R Q"]
    w_o: Float[Tensor, "D H V"]
    inv_freq: tuple[float, ...]
    pairs: tuple[int, ...] | None = None
    b_dkv: Float[Tensor, " C"] | None = None
    b_kr: Float[Tensor, " R"] | None = None
    b_uq: Float[Tensor, "H N"] | None = None
    b_qr: Float[Tensor, "H R"] | None = None
    b_o: Float[Tensor, " D"] | None = None
    w_qa: Float[Tensor, "norms block D"] | None = None
    b_qa: Float[Tensor, "norms block"] | None = None
    w_kn: Float[Tensor, "scales rows D"] | None = None
    b_kn: Float[Tensor, "scales rows"] | None = None

    @property
    def shape(self) -> MLAShape:
        """C, R, N, V and the number of key scales."""
        return MLAShape(
            kv_rank=self.w_dkv.shape[0],
            rope_dim=self.w_kr.shape[0],
            nope_dim=self.w_uk.shape[1],
            value_dim=self.w_uv.shape[1],
            key_scales=0 if self.w_kn is None else self.w_kn.shape[0],
        )

    def to(self, dtype: torch.dtype) -> MLAWeights:
        """The same layer with every tensor in `dtype`."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("inv_freq", "pairs")}
        return replace(self, **{name: t.to(dtype) for name, t in tensors.items() if t is not None})
