"""What a converted model should answer, worked out without the code that writes or loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mla_convert.maths.attention import ScoreChanges, naive_attention
from mla_convert.mla import MLAWeights
from mla_convert.sources import Source
from mla_convert.spec import SourceSpec


class PaperAttention(nn.Module):
    """One layer's attention as DeepSeek-V2 writes it (equations 9 to 19), in float64, without a cache.

    It does to scores what the source does, and normalises queries and keys where the source does.
    """

    def __init__(self, weights: MLAWeights, spec: SourceSpec, layer: int) -> None:
        super().__init__()
        self.weights = weights.to(torch.float64)
        self.scale = spec.attention_scale
        self.rope = spec.rope_of(layer)
        self.eps = 0.0 if spec.qk_norm is None else spec.qk_norm.eps
        slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes)
        self.changes = ScoreChanges(
            softcap=spec.attention_softcap,
            slopes=slopes,
            rounded_slopes=spec.alibi_rounded,
            window=spec.windows[layer],
        )

    def forward(self, hidden_states: Float[Tensor, "B S D"], **_: Any) -> tuple[Float[Tensor, "B S D"], None]:
        w, x = self.weights, hidden_states.double()
        queries = x.unsqueeze(1).expand(-1, w.w_uq.shape[0], -1, -1) if w.w_qa is None else self._normalised(x)
        q_nope = torch.einsum("hnq,bhsq->bhsn", w.w_uq, queries)
        q_rope = torch.einsum("hrq,bhsq->bhsr", w.w_qr, queries)
        c_kv, k_rope = x @ w.w_dkv.mT, x @ w.w_kr.mT
        if w.b_uq is not None and w.b_qr is not None:
            q_nope, q_rope = q_nope + w.b_uq[:, None], q_rope + w.b_qr[:, None]
        if w.b_dkv is not None and w.b_kr is not None:
            c_kv, k_rope = c_kv + w.b_dkv, k_rope + w.b_kr
        changes = replace(self.changes, key_scale=self._key_scale(x))
        turned = self._turn(q_rope), self._turn(k_rope)
        trace = naive_attention(q_nope, turned[0], c_kv, turned[1], w.w_uk, w.w_uv, self.scale, changes)
        out = torch.einsum("bshv,dhv->bsd", trace.outputs, w.w_o)
        return (out if w.b_o is None else out + w.b_o).to(hidden_states.dtype), None

    def _normalised(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B H S K"]:
        """What the norm makes of the source's queries, without its weights."""
        w = self.weights
        assert w.w_qa is not None
        blocks = torch.einsum("nqd,bsd->bsnq", w.w_qa, x)
        blocks = blocks if w.b_qa is None else blocks + w.b_qa
        blocks = blocks / (blocks.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return blocks.flatten(2).unflatten(2, (w.w_uq.shape[0], -1)).transpose(1, 2)

    def _key_scale(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B H S"] | None:
        """1/rms of each token's keys, for every head."""
        w = self.weights
        if w.w_kn is None:
            return None
        keys = torch.einsum("gkd,btd->bgtk", w.w_kn, x)
        keys = keys if w.b_kn is None else keys + w.b_kn[:, None]
        scales = (keys.square().mean(-1) + self.eps).rsqrt()
        return scales.repeat_interleave(w.w_uq.shape[0] // scales.shape[1], dim=1)

    def _turn(self, x: Float[Tensor, "*batch S R"]) -> Float[Tensor, "*batch S R"]:
        """Rotate the slots by position, as complex numbers."""
        positions = torch.arange(x.shape[-2], dtype=torch.float32)
        frequencies = torch.tensor(self._frequencies(x.shape[-2]), dtype=torch.float32)
        angles = (positions[:, None] * frequencies).double()
        real, imaginary = x.chunk(2, dim=-1)
        factors = torch.full_like(angles, self.rope.attention_scaling)
        turned = torch.complex(real, imaginary) * torch.polar(factors, angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    def _frequencies(self, length: int) -> list[float]:
        """Of the slots, for a text of so many tokens."""
        update, pairs = self.rope.update, self.weights.pairs
        if update is None or pairs is None or length <= update.original_positions:
            return list(self.weights.inv_freq)
        if update.kind == "longrope":
            return [update.inv_freq[pair] for pair in pairs]
        dim, growth = self.rope.dim, update.factor * length / update.original_positions - update.factor + 1
        theta = update.theta * growth ** (dim / (dim - 2))
        return [theta ** (-2 * pair / dim) for pair in pairs]


def reference_logits(
    source: Source, layers: Mapping[int, MLAWeights], input_ids: Int[Tensor, "B S"], dtype: torch.dtype
) -> Float[Tensor, "B S vocabulary"]:
    """Return the logits of the source's decoder with each layer's attention replaced by its MLA form.

    The weights are rounded to `dtype`, as they are when written, and computed with in float32.
    """
    model = source.load_decoder(dtype=dtype).float()
    for i, weights in layers.items():
        model.model.layers[i].self_attn = PaperAttention(weights.to(dtype), source.spec, i)
    with torch.no_grad():
        return model(input_ids, use_cache=False).logits.float()
