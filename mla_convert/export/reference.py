"""What a converted model should answer, worked out without the code that writes or loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mla_convert.maths.attention import naive_attention
from mla_convert.mla import MLAWeights
from mla_convert.sources import Source
from mla_convert.spec import SourceSpec


class PaperAttention(nn.Module):
    """One layer's attention as DeepSeek-V2 writes it (equations 9 to 19), in float64, without a cache."""

    def __init__(self, weights: MLAWeights, spec: SourceSpec) -> None:
        super().__init__()
        self.weights = weights.to(torch.float64)
        self.scale = spec.attention_scale
        self.rope_scaling = spec.rope.attention_scaling

    def forward(self, hidden_states: Float[Tensor, "B S D"], **_: Any) -> tuple[Float[Tensor, "B S D"], None]:
        w, x = self.weights, hidden_states.double()
        q_nope = torch.einsum("hnd,bsd->bhsn", w.w_uq, x)
        q_rope = torch.einsum("hrd,bsd->bhsr", w.w_qr, x)
        c_kv, k_rope = x @ w.w_dkv.mT, x @ w.w_kr.mT
        if w.b_uq is not None and w.b_qr is not None:
            q_nope, q_rope = q_nope + w.b_uq[:, None], q_rope + w.b_qr[:, None]
        if w.b_dkv is not None and w.b_kr is not None:
            c_kv, k_rope = c_kv + w.b_dkv, k_rope + w.b_kr
        trace = naive_attention(q_nope, self._turn(q_rope), c_kv, self._turn(k_rope), w.w_uk, w.w_uv, self.scale)
        out = torch.einsum("bshv,dhv->bsd", trace.outputs, w.w_o)
        return (out if w.b_o is None else out + w.b_o).to(hidden_states.dtype), None

    def _turn(self, x: Float[Tensor, "*batch S R"]) -> Float[Tensor, "*batch S R"]:
        """Rotate the slots by position, as complex numbers."""
        positions = torch.arange(x.shape[-2], dtype=torch.float32)
        angles = (positions[:, None] * torch.tensor(self.weights.inv_freq, dtype=torch.float32)).double()
        real, imaginary = x.chunk(2, dim=-1)
        turned = torch.complex(real, imaginary) * torch.polar(torch.full_like(angles, self.rope_scaling), angles)
        return torch.cat((turned.real, turned.imag), dim=-1)


def reference_logits(
    source: Source, layers: Mapping[int, MLAWeights], input_ids: Int[Tensor, "B S"], dtype: torch.dtype
) -> Float[Tensor, "B S vocabulary"]:
    """Return the logits of the source's own model with each layer's attention replaced by its MLA form.

    The weights are rounded to `dtype`, as they are when written, and computed with in float32. Attention is causal
    without a window, so the input must be shorter than any sliding window.
    """
    model = source.load_model(dtype=dtype).float()
    model.model.rotary_emb.to(torch.float32)
    for i, weights in layers.items():
        model.model.layers[i].self_attn = PaperAttention(weights.to(dtype), source.spec)
    with torch.no_grad():
        return model(input_ids, use_cache=False).logits.float()
