"""A decoder written out from its definition in float64, with the places marked at which calibration takes gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mla_convert.spec import SourceSpec


@dataclass
class Layer:
    """What one layer saw, and where its loss may be differentiated.

    Attributes:
        query, key, value: before RoPE, [H S K], [G S K], [G S K].
        weights: attention [H S S].
        shift_key, shift_value: zeros added to key and value.
        shift_unrotated: zeros z_i, one for each query head; head i's score of (t, s) gains (f_i q_i,t) · z_i,s without
            any rotation, f_i a complex factor on the query's pairs.
    """

    query: Tensor = field(default_factory=lambda: torch.empty(0))
    key: Tensor = field(default_factory=lambda: torch.empty(0))
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    shift_key: Tensor = field(default_factory=lambda: torch.empty(0))
    shift_value: Tensor = field(default_factory=lambda: torch.empty(0))
    shift_unrotated: Tensor = field(default_factory=lambda: torch.empty(0))


class Decoder:
    """A source model's weights in float64, run over one context of tokens."""

    def __init__(self, model: PreTrainedModel, spec: SourceSpec) -> None:
        self.spec = spec
        self.weights = {name: value.detach().double() for name, value in model.state_dict().items()}

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.weights[f"{name}.weight"].T
        return out + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else out

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.spec.rms_norm_eps).sqrt()
        return x / scale * self.weights[f"{name}.weight"]

    def rotate(self, x: Tensor) -> Tensor:
        """RoPE on [heads S K]: dims l and l + K/2 by position times frequency, times the source's own factor."""
        half = self.spec.head_dim // 2
        angles = torch.arange(x.shape[1])[:, None] * torch.tensor(self.spec.rope.inv_freq, dtype=torch.float64)
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., :half], x[..., half:]
        turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
        return turned * self.spec.rope.attention_scaling

    def run(
        self,
        tokens: Tensor,
        factors: Mapping[int, Tensor] | None = None,
        shifts: Mapping[tuple[int, str], Tensor] | None = None,
    ) -> tuple[Tensor, list[Layer]]:
        """Logits [S vocabulary] and what each layer saw.

        Args:
            factors: for each layer [H F], the f_i of the unrotated scores; 1 without.
            shifts: what stands in place of zeros, by layer and name.
        """
        spec = self.spec
        heads, groups, dim, half = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim // 2
        length = len(tokens)
        later = torch.arange(length)[None, :] - torch.arange(length)[:, None]  # s - t
        layers: list[Layer] = []
        x = self.weights["model.embed_tokens.weight"][tokens]
        for i in range(spec.num_layers):
            name, layer = f"model.layers.{i}", Layer()
            layers.append(layer)
            normed = self._norm(f"{name}.input_layernorm", x)
            q, k, v = (self._linear(f"{name}.self_attn.{p}_proj", normed) for p in "qkv")
            layer.query = q.unflatten(1, (heads, dim)).transpose(0, 1)
            layer.key, layer.value = (y.unflatten(1, (groups, dim)).transpose(0, 1) for y in (k, v))
            for kind, size in (("shift_key", groups), ("shift_value", groups), ("shift_unrotated", heads)):
                zeros = torch.zeros(size, length, dim, dtype=torch.float64, requires_grad=True)
                setattr(layer, kind, (shifts or {}).get((i, kind), zeros))
            keys = self.rotate(layer.key + layer.shift_key).repeat_interleave(heads // groups, 0)
            values = (layer.value + layer.shift_value).repeat_interleave(heads // groups, 0)
            scores = self.rotate(layer.query) @ keys.mT
            factor = torch.ones(heads, half, dtype=torch.complex128) if factors is None else factors[i]
            pairs = torch.complex(layer.query[..., :half], layer.query[..., half:]) * factor[:, None]
            unrotated = torch.cat((pairs.real, pairs.imag), dim=-1) * spec.rope.attention_scaling**2
            scores = (scores + unrotated @ layer.shift_unrotated.mT) * spec.attention_scale
            hidden = later > 0
            window = spec.windows[i]
            if window is not None:
                hidden = hidden | (later <= -window)
            layer.weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            heads_out = (layer.weights @ values).transpose(0, 1).flatten(1)
            x = x + self._linear(f"{name}.self_attn.o_proj", heads_out)
            normed = self._norm(f"{name}.post_attention_layernorm", x)
            gate = torch.nn.functional.silu(self._linear(f"{name}.mlp.gate_proj", normed))
            x = x + self._linear(f"{name}.mlp.down_proj", gate * self._linear(f"{name}.mlp.up_proj", normed))
        return self._linear("lm_head", self._norm("model.norm", x)), layers


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The summed negative log-likelihood of the labels [S]."""
    return -logits.log_softmax(-1).gather(1, labels[:, None]).sum()
