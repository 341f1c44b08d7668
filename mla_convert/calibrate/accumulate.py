"""The running sums of one layer's calibration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from mla_convert.calibrate.statistics import GradientStatistics, HeldOutStatistics, LayerStatistics
from mla_convert.maths.rope import to_pairs
from mla_convert.spec import SourceSpec


@dataclass(frozen=True)
class Seen:
    """What a context's attention weights p_hts add up to, in float64.

    Attributes:
        received: Σ_ht p_hts², [S]: the squared attention that each token receives.
        cos, sin: Σ_s p_hts cos(theta·s) and Σ_s p_hts sin(theta·s), [H S F]: the mean rotation of what a query sees.
    """

    received: Float[Tensor, "S"]
    cos: Float[Tensor, "H S F"]
    sin: Float[Tensor, "H S F"]


class LayerAccumulator:
    """Adds token contexts to the sums of a :class:`LayerStatistics`; inputs are float64, on any device."""

    def __init__(self, spec: SourceSpec) -> None:
        heads, groups, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        pairs = dim // 2
        self.tokens = 0
        self.key_value = torch.zeros(spec.kv_width, spec.kv_width, dtype=torch.float64)
        self.attended = torch.zeros_like(self.key_value)
        self.attended_weight = 0.0
        self.query = torch.zeros(heads, dim, dim, dtype=torch.float64)
        self.rotation = torch.zeros(heads, pairs, dtype=torch.complex128)
        self.query_energy = torch.zeros(heads, pairs, dtype=torch.float64)
        self.noise_attended = torch.zeros_like(self.key_value)
        self.noise_weight = 0.0
        self.pair_tokens = 0
        self.pair_gradients = torch.zeros(pairs, groups + heads, groups + heads, dtype=torch.complex128)
        self.constants: Complex[Tensor, "H F"] | None = None
        self.content_tokens = 0
        self.content_gradients = torch.zeros_like(self.key_value)
        self.held_out_attended = torch.zeros_like(self.key_value)
        self.held_out_weight = 0.0
        self.held_out_tokens = 0
        self.held_out_gradients = torch.zeros_like(self.key_value)

    def add_forward(
        self,
        query: Float[Tensor, "H S K"],
        key: Float[Tensor, "G S K"],
        value: Float[Tensor, "G S V"],
        seen: Seen,
        cos: Float[Tensor, "S F"],
        sin: Float[Tensor, "S F"],
    ) -> None:
        """Add a context: queries and keys before RoPE, values, what attention saw, and the positions' angles."""
        stacked = _stacked(key, value)
        attended, weight = _attended(stacked, seen.received)
        self.tokens += query.shape[1]
        self.key_value += (stacked.mT @ stacked).cpu()
        self.attended += attended
        self.attended_weight += weight
        self.query += (query.mT @ query).cpu()
        energy = query.square().unflatten(-1, (2, -1)).sum(-2)
        # Turned back by each query's own position.
        real = (energy * (seen.cos * cos + seen.sin * sin)).sum(1)
        imaginary = (energy * (seen.sin * cos - seen.cos * sin)).sum(1)
        self.rotation += torch.complex(real, imaginary).cpu()
        self.query_energy += energy.sum(1).cpu()

    def add_noise(self, key: Float[Tensor, "G S K"], value: Float[Tensor, "G S V"], seen: Seen) -> None:
        """Add a context of uniformly drawn tokens."""
        attended, weight = _attended(_stacked(key, value), seen.received)
        self.noise_attended += attended
        self.noise_weight += weight

    def add_pair_gradients(self, key: Float[Tensor, "G S K"], probe: Float[Tensor, "H S K"]) -> None:
        """Add a context's gradients at keys before RoPE and at each query head's unrotated keys."""
        stacked = to_pairs(torch.cat((key, probe))).permute(2, 0, 1)  # [F GH S]
        self.pair_tokens += key.shape[1]
        self.pair_gradients += (stacked @ stacked.mH).cpu()

    def add_content_gradients(self, key: Float[Tensor, "G S K"], value: Float[Tensor, "G S V"]) -> None:
        """Add a context's gradients at content keys (taken with `constants`) and values."""
        stacked = _stacked(key, value)
        self.content_tokens += key.shape[1]
        self.content_gradients += (stacked.mT @ stacked).cpu()

    def add_held_out(self, key: Float[Tensor, "G S K"], value: Float[Tensor, "G S V"], seen: Seen) -> None:
        """Add a context that is set aside."""
        attended, weight = _attended(_stacked(key, value), seen.received)
        self.held_out_attended += attended
        self.held_out_weight += weight

    def add_held_out_gradients(self, key: Float[Tensor, "G S K"], value: Float[Tensor, "G S V"]) -> None:
        """Add the gradients of a context that is set aside, taken as those of `add_content_gradients`."""
        stacked = _stacked(key, value)
        self.held_out_tokens += key.shape[1]
        self.held_out_gradients += (stacked.mT @ stacked).cpu()

    def pair_moment(self) -> Complex[Tensor, "F GH GH"]:
        """The mean of the pair gradients' sums so far."""
        return self.pair_gradients / self.pair_tokens

    def replace_rotation(self, query: Float[Tensor, "1 H S K"]) -> Float[Tensor, "1 H S K"]:
        """Multiply queries before RoPE by conj(rho), pair by pair: what the content path scores with."""
        assert self.constants is not None  # fitted before the first content context
        rho = self.constants[None, :, None].to(query.device)
        real, imaginary = query.chunk(2, dim=-1)
        cos, sin = rho.real.to(query.dtype), rho.imag.to(query.dtype)
        return torch.cat((real * cos + imaginary * sin, imaginary * cos - real * sin), dim=-1)

    def add(self, other: LayerAccumulator) -> None:
        """Add the sums of another, of other contexts; `constants` are the same in both, or in neither."""
        for name, value in vars(other).items():
            if name != "constants":
                setattr(self, name, getattr(self, name) + value)

    def statistics(self) -> LayerStatistics:
        """The sums so far."""
        gradients = None
        if self.constants is not None:
            gradients = GradientStatistics(
                pair_tokens=self.pair_tokens,
                pairs=self.pair_gradients,
                constants=self.constants,
                content_tokens=self.content_tokens,
                content=self.content_gradients,
            )
        held_out = None
        if self.held_out_tokens:
            held_out = HeldOutStatistics(
                attended=self.held_out_attended,
                attended_weight=self.held_out_weight,
                content_tokens=self.held_out_tokens,
                content=self.held_out_gradients,
            )
        return LayerStatistics(
            tokens=self.tokens,
            key_value=self.key_value,
            attended=self.attended,
            attended_weight=self.attended_weight,
            query=self.query,
            rotation=self.rotation,
            query_energy=self.query_energy,
            noise_attended=self.noise_attended,
            noise_weight=self.noise_weight,
            gradients=gradients,
            held_out=held_out,
        )


def _attended(stacked: Float[Tensor, "S J"], received: Float[Tensor, "S"]) -> tuple[Float[Tensor, "J J"], float]:
    """Σ w y y^T and Σ w, w the squared attention that each token receives from all heads and queries."""
    return ((stacked * received[:, None]).mT @ stacked).cpu(), received.sum().item()


def _stacked(key: Float[Tensor, "G S K"], value: Float[Tensor, "G S V"]) -> Float[Tensor, "S J"]:
    """Keys over values of each token."""
    return torch.cat((_by_token(key), _by_token(value)), dim=1)


def _by_token(heads: Float[Tensor, "G S K"]) -> Float[Tensor, "S J"]:
    """Stack the heads of each token: [S, G·K]."""
    return heads.transpose(0, 1).flatten(1)
