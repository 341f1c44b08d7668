"""A random attention layer with its statistics, and what it and its converted form must answer, written out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mla_convert.calibrate.statistics import GradientStatistics, LayerStatistics
from mla_convert.mla import MLAWeights
from mla_convert.qk_norm import without_norms
from mla_convert.sources.attention import AttentionWeights
from mla_convert.spec import RopeSpec
from tests.maths.samples import complex_normal, normal

SAMPLES = 300
EPS = 0.05  # of norms of queries and keys: large enough that losing it shows


@dataclass(frozen=True)
class Case:
    """A random layer, inputs to it, and statistics that are sums over these inputs."""

    weights: AttentionWeights
    rope: RopeSpec
    x: Tensor
    received: Tensor
    statistics: LayerStatistics

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """H, G, K, D."""
        heads, dim, width = self.weights.w_q.shape
        return heads, self.weights.w_k.shape[0], dim, width


def projected(w: Tensor, b: Tensor | None, x: Tensor) -> Tensor:
    """[heads K D] and [n D] -> [n heads K]."""
    out = torch.einsum("hkd,nd->nhk", w.double(), x)
    return out if b is None else out + b


def normalised(x: Tensor, weight: Tensor | None, scope: str) -> Tensor:
    """[n heads K] divided by its root mean square over a head, or over all heads of a token, times the weight."""
    if weight is None:
        return x
    over = (-1,) if scope == "head" else (-2, -1)
    return x / (x.square().mean(over, keepdim=True) + EPS).sqrt() * weight


def case(
    heads: int = 4,
    groups: int = 2,
    dim: int = 6,
    width: int = 30,
    *,
    biased: bool = False,
    scaling: float = 1.0,
    turning: int | None = None,
    norms: Literal["head", "all"] | None = None,
    seed: int = 0,
) -> Case:
    def bias(of: int, at: int) -> Tensor | None:
        return normal(of, dim, seed=seed + at) if biased else None

    weights = AttentionWeights(
        w_q=normal(heads, dim, width, seed=seed),
        w_k=normal(groups, dim, width, seed=seed + 1),
        w_v=normal(groups, dim, width, seed=seed + 2),
        w_o=normal(width, heads, dim, seed=seed + 3),
        b_q=bias(heads, 4),
        b_k=bias(groups, 5),
        b_v=bias(groups, 6),
        b_o=normal(width, seed=seed + 7) if biased else None,
        query_norm=None if norms is None else 1 + 0.3 * normal(heads, dim, seed=seed + 20),
        key_norm=None if norms is None else 1 + 0.3 * normal(groups, dim, seed=seed + 21),
        norm_scope=norms or "head",
    )
    pairs = dim // 2
    turning = pairs if turning is None else turning
    scales = 0.93 ** torch.arange(width, dtype=torch.float64)
    x = normal(SAMPLES, width, seed=seed + 8) * scales + 0.2
    received = normal(SAMPLES, seed=seed + 9).square()
    linear = without_norms(weights)  # what calibration sees of keys
    k = projected(linear.w_k, linear.b_k, x)
    q = normalised(projected(weights.w_q, weights.b_q, x), weights.query_norm, weights.norm_scope)
    v = projected(weights.w_v, weights.b_v, x)
    y = torch.cat((k.flatten(1), v.flatten(1)), dim=1)
    energy = q.unflatten(-1, (2, pairs)).square().sum((0, 2))
    shrink = torch.linspace(0.2, 0.95, pairs, dtype=torch.float64)
    turned = complex_normal(heads, pairs, seed=seed + 10)
    constants = shrink * turned / turned.abs()
    constants[:, turning:] = 1.0
    g = complex_normal(SAMPLES, pairs, heads, seed=seed + 11)
    gamma = (constants.conj().mT * g).unflatten(-1, (groups, -1)).sum(-1)
    u = torch.cat((gamma + 0.5 * complex_normal(SAMPLES, pairs, groups, seed=seed + 12), g), dim=-1)
    content = normal(SAMPLES, y.shape[1], seed=seed + 13) @ normal(y.shape[1], y.shape[1], seed=seed + 14)
    statistics = LayerStatistics(
        tokens=SAMPLES,
        key_value=y.T @ y,
        attended=y.T @ (received[:, None] * y),
        attended_weight=received.sum().item(),
        query=torch.einsum("nhk,nhl->hkl", q, q),
        rotation=constants * energy,
        query_energy=energy,
        noise_attended=torch.zeros_like(y.T @ y),
        noise_weight=0.0,
        gradients=GradientStatistics(
            pair_tokens=SAMPLES,
            pairs=torch.einsum("nla,nlb->lab", u, u.conj()),
            constants=constants,
            content_tokens=SAMPLES,
            content=content.T @ content,
        ),
    )
    frequencies = tuple(10.0 ** (-2 * pair / pairs) if pair < turning else 0.0 for pair in range(pairs))
    return Case(weights, RopeSpec(2 * turning, frequencies, attention_scaling=scaling), x, received, statistics)


def turned(x: Tensor, frequencies: tuple[float, ...], scaling: float) -> Tensor:
    """RoPE on [n ... R], token n at position n, in rotate-half order; what has frequency 0 does not turn or scale."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    shape = (x.shape[0], *[1] * (x.ndim - 2), half)
    factors = torch.where(torch.tensor(frequencies) > 0, scaling, 1.0).double()
    cos, sin = (angles.cos() * factors).view(shape), (angles.sin() * factors).view(shape)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def source_answers(c: Case, x: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [H n n] without the softmax scale, and every head's values [n H K]."""
    heads, groups, _, _ = c.sizes
    w = c.weights
    q = normalised(projected(w.w_q, w.b_q, x), w.query_norm, w.norm_scope)
    k = normalised(projected(w.w_k, w.b_k, x), w.key_norm, w.norm_scope)
    q, k = (turned(y, c.rope.inv_freq, c.rope.attention_scaling) for y in (q, k))
    v = projected(w.w_v, w.b_v, x)
    scores = torch.einsum("thk,shk->hts", q, k.repeat_interleave(heads // groups, 1))
    return scores, v.repeat_interleave(heads // groups, 1)


def mla_answers(w: MLAWeights, rope: RopeSpec, x: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the converted layer (DeepSeek-V2's equations 9 to 19)."""
    latent = x @ w.w_dkv.T if w.b_dkv is None else x @ w.w_dkv.T + w.b_dkv
    k_rope = x @ w.w_kr.T if w.b_kr is None else x @ w.w_kr.T + w.b_kr
    keys = torch.einsum("hnc,sc->shn", w.w_uk, latent)
    if w.w_qa is None:
        q_nope, q_rope = projected(w.w_uq, w.b_uq, x), projected(w.w_qr, w.b_qr, x)
    else:
        blocks = projected(w.w_qa, w.b_qa, x)
        blocks = (blocks / (blocks.square().mean(-1, keepdim=True) + EPS).sqrt()).reshape(len(x), len(w.w_uq), -1)
        q_nope, q_rope = (torch.einsum("hjk,nhk->nhj", mixing, blocks) for mixing in (w.w_uq, w.w_qr))
    content = torch.einsum("thn,shn->hts", q_nope, keys)
    q_rope = turned(q_rope, w.inv_freq, rope.attention_scaling)
    rotary = torch.einsum("thr,sr->hts", q_rope, turned(k_rope, w.inv_freq, rope.attention_scaling))
    scores = content + rotary
    if w.w_kn is not None:
        sizes = (projected(w.w_kn, w.b_kn, x).square().mean(-1) + EPS).sqrt()  # [n scales]
        scores = scores / sizes.T.repeat_interleave(len(scores) // sizes.shape[1], 0)[:, None]
    return scores, torch.einsum("hvc,sc->shv", w.w_uv, latent)


def relative(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max()).item()
