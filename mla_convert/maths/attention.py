"""MLA attention in float64, twice: as the definition says, and absorbed. Oracles for tests and for verification.

Both read one cache, which holds for each token the latent c_kv [C] and the rotated shared key k_rope [R], and both
return what they computed on the way, so that a fast implementation can be compared stage by stage.
DeepSeek-V2 (arXiv 2405.04434), equations 9 to 19 and section 2.1.2 ("absorbed into").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class ScoreChanges:
    """What some families do to scores that are already scaled, in this order; the defaults change nothing.

    Attributes:
        key_scale: a factor on every head's score of a token, 1/rms of normalised keys.
        softcap: cap·tanh(score / cap).
        slopes: ALiBi's: adds slope·t for the cached token t (Press et al., 2022, up to a constant of the softmax);
            with ``rounded_slopes``, slope, t and their product are rounded to bfloat16, as Falcon's class does.
        window: how many tokens up to itself a query sees; None for all.
    """

    key_scale: Float[Tensor, "B H T"] | None = None
    softcap: float | None = None
    slopes: Float[Tensor, " H"] | None = None
    rounded_slopes: bool = False
    window: int | None = None

    def apply(self, logits_BHST: Tensor) -> Tensor:
        """Return the changed scores, [B H S T]."""
        if self.key_scale is not None:
            logits_BHST = logits_BHST * self.key_scale.to(torch.float64).unsqueeze(2)
        if self.softcap is not None:
            logits_BHST = self.softcap * torch.tanh(logits_BHST / self.softcap)
        if self.slopes is not None:
            dtype = torch.bfloat16 if self.rounded_slopes else torch.float64
            position_T = torch.arange(logits_BHST.shape[-1], device=logits_BHST.device).to(dtype)
            logits_BHST = logits_BHST + (self.slopes.to(dtype)[:, None] * position_T).unsqueeze(1)
        return logits_BHST


UNCHANGED = ScoreChanges()


@dataclass(frozen=True)
class AttentionTrace:
    """What one attention layer computed, all in float64.

    Attributes:
        logits: [B H S T], scaled, before the causal mask.
        weights: [B H S T], the softmax over the cached tokens that a query may see; exactly 0 elsewhere.
        outputs: [B S H V], each head's weighted sum of values, before W_O.
    """

    logits: Tensor
    weights: Tensor
    outputs: Tensor


def causal_mask(
    queries: int, cached: int, device: torch.device | None = None, window: int | None = None
) -> Bool[Tensor, "S T"]:
    """Return which cached tokens each query sees, the queries being the last ``queries`` of ``cached`` tokens."""
    position_S1 = torch.arange(cached - queries, cached, device=device).unsqueeze(1)
    position_1T = torch.arange(cached, device=device).unsqueeze(0)
    seen_ST = position_1T <= position_S1
    return seen_ST if window is None else seen_ST & (position_1T > position_S1 - window)


def naive_attention(
    q_nope: Float[Tensor, "B H S N"],
    q_rope: Float[Tensor, "B H S R"],
    c_kv: Float[Tensor, "B T C"],
    k_rope: Float[Tensor, "B T R"],
    w_uk: Float[Tensor, "H N C"],
    w_uv: Float[Tensor, "H V C"],
    scale: float,
    changes: ScoreChanges = UNCHANGED,
) -> AttentionTrace:
    """Return attention with every head's keys and values rebuilt from the latent (expanded form).

    Head h's key is [W_UK,h c ; k_rope] of N + R dims and its value is W_UV,h c; the queries are the last S of the T
    cached tokens (S <= T). ``scale`` multiplies q·k before the softmax.
    """
    q_nope, q_rope, c_kv, k_rope, w_uk, w_uv = _float64(q_nope, q_rope, c_kv, k_rope, w_uk, w_uv)
    k_nope_BHTN = torch.einsum("hnc,btc->bhtn", w_uk, c_kv)
    v_BHTV = torch.einsum("hvc,btc->bhtv", w_uv, c_kv)
    k_rope_BHTR = k_rope.unsqueeze(1).expand(-1, w_uk.shape[0], -1, -1)
    q_BHSK = torch.cat([q_nope, q_rope], dim=-1)
    k_BHTK = torch.cat([k_nope_BHTN, k_rope_BHTR], dim=-1)
    logits_BHST = changes.apply(scale * torch.einsum("bhsk,bhtk->bhst", q_BHSK, k_BHTK))
    weights_BHST = _masked_softmax(logits_BHST, changes.window)
    outputs_BSHV = torch.einsum("bhst,bhtv->bshv", weights_BHST, v_BHTV)
    return AttentionTrace(logits_BHST, weights_BHST, outputs_BSHV)


def absorbed_attention(
    q_nope: Float[Tensor, "B H S N"],
    q_rope: Float[Tensor, "B H S R"],
    c_kv: Float[Tensor, "B T C"],
    k_rope: Float[Tensor, "B T R"],
    w_uk: Float[Tensor, "H N C"],
    w_uv: Float[Tensor, "H V C"],
    scale: float,
    changes: ScoreChanges = UNCHANGED,
) -> AttentionTrace:
    """Return the same attention with no key or value ever rebuilt (absorbed form).

    q_latent,h = W_UK,hᵀ q_nope,h scores directly against c_kv; W_UV,h is applied once a query, to the weighted sum
    of latents. Equal to `naive_attention` by associativity.
    """
    latents_BSHC, logits_BHST, weights_BHST = _attend_latent(q_nope, q_rope, c_kv, k_rope, w_uk, scale, changes)
    outputs_BSHV = torch.einsum("hvc,bshc->bshv", w_uv.to(torch.float64), latents_BSHC)
    return AttentionTrace(logits_BHST, weights_BHST, outputs_BSHV)


def latent_attention(
    q_nope: Float[Tensor, "B H S N"],
    q_rope: Float[Tensor, "B H S R"],
    c_kv: Float[Tensor, "B T C"],
    k_rope: Float[Tensor, "B T R"],
    w_uk: Float[Tensor, "H N C"],
    scale: float,
) -> Float[Tensor, "B S H C"]:
    """Return each head's weighted sum of latents, u = Σ a c: what a decode kernel hands to W_UV or to W_O·W_UV."""
    return _attend_latent(q_nope, q_rope, c_kv, k_rope, w_uk, scale)[0]


def _attend_latent(
    q_nope: Tensor,
    q_rope: Tensor,
    c_kv: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    scale: float,
    changes: ScoreChanges = UNCHANGED,
) -> tuple[Tensor, Tensor, Tensor]:
    q_nope, q_rope, c_kv, k_rope, w_uk = _float64(q_nope, q_rope, c_kv, k_rope, w_uk)
    q_latent_BHSC = torch.einsum("hnc,bhsn->bhsc", w_uk, q_nope)
    content_BHST = torch.einsum("bhsc,btc->bhst", q_latent_BHSC, c_kv)
    rope_BHST = torch.einsum("bhsr,btr->bhst", q_rope, k_rope)
    logits_BHST = changes.apply(scale * (content_BHST + rope_BHST))
    weights_BHST = _masked_softmax(logits_BHST, changes.window)
    latents_BSHC = torch.einsum("bhst,btc->bshc", weights_BHST, c_kv)
    return latents_BSHC, logits_BHST, weights_BHST


def _masked_softmax(logits_BHST: Tensor, window: int | None = None) -> Tensor:
    mask_ST = causal_mask(logits_BHST.shape[-2], logits_BHST.shape[-1], logits_BHST.device, window)
    return logits_BHST.masked_fill(~mask_ST, float("-inf")).softmax(dim=-1)


def _float64(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(torch.float64) for tensor in tensors)
