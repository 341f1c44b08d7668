"""What stands in for a layer's attention while it calibrates: it attends as the source does, and notes what passes."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mla_convert.calibrate.accumulate import LayerAccumulator
from mla_convert.maths.rope import unrotate
from mla_convert.spec import SourceSpec


class LayerRecorder:
    """Stands in for one layer's attention function, and hands what passes through it to an accumulator.

    Its stage says what is noted: ``forward`` (queries, keys, values and weights), ``pairs``, ``content``, ``held_out``
    (these, and the loss's gradients), ``noise``, and ``plain`` (nothing).
    """

    def __init__(self, spec: SourceSpec, layer: int, context: int, device: torch.device) -> None:
        self.spec = spec
        rope = spec.rope_of(layer)
        positions = torch.arange(context, dtype=torch.float64, device=device)
        angles = positions[:, None] * torch.tensor(rope.inv_freq, dtype=torch.float64, device=device)
        self.cos, self.sin = angles.cos(), angles.sin()
        # What the source multiplies each dim of queries and keys by when it turns them.
        self.factors = torch.tensor(rope.factors * 2, dtype=torch.float64, device=device)

        self.stage = "forward"
        self.accumulator = LayerAccumulator(spec)
        self.leaves: tuple[Tensor, Tensor, Tensor] | None = None  # key, value and probe, whose gradients are wanted

    def begin(self, stage: str, accumulator: LayerAccumulator) -> None:
        """Record the next context into `accumulator`."""
        self.stage, self.accumulator, self.leaves = stage, accumulator, None

    def finish(self) -> None:
        """Take the gradients of the context just run."""
        if self.leaves is None:
            return
        key, value, probe = (leaf.grad[0].double() for leaf in self.leaves if leaf.grad is not None)
        self.leaves = None
        if self.stage == "pairs":
            key = unrotate(key, self.cos, self.sin) * self.factors
            self.accumulator.add_pair_gradients(key, probe)
        elif self.stage == "held_out":
            self.accumulator.add_held_out_gradients(probe, value)
        else:
            self.accumulator.add_content_gradients(probe, value)

    def attend(
        self,
        query: Float[Tensor, "1 H S K"],
        key: Float[Tensor, "1 G S K"],
        value: Float[Tensor, "1 G S V"],
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
        key_scale: Float[Tensor, "1 G S"] | None,
    ) -> Float[Tensor, "1 S H V"]:
        if self.stage == "plain":
            return _mix(_weights(query, key, mask, scaling, softcap, None), value)
        if key_scale is not None:  # what is recorded is linear in the layer's input: keys before their norm
            key = key / key_scale[..., None]
        if self.stage in ("forward", "noise"):
            weights = _weights(query, key, mask, scaling, softcap, key_scale)
            self._add_forward(query, key, value, weights)
            return _mix(weights, value)
        spec = self.spec
        heads = spec.num_heads if self.stage == "pairs" else spec.num_kv_heads
        key, value = key + 0, value + 0  # of the graph even where nothing before them needs gradients
        probe = query.new_zeros(1, heads, *query.shape[2:], requires_grad=True)
        key.retain_grad()
        value.retain_grad()
        self.leaves = (key, value, probe)
        content = unrotate(query, self.cos.to(query.dtype), self.sin.to(query.dtype)) * self.factors.to(query.dtype)
        if self.stage != "pairs":
            content = self.accumulator.replace_rotation(content)
        counted = False

        def attention(query: Tensor, content: Tensor, key: Tensor, value: Tensor, probe: Tensor) -> Tensor:
            nonlocal counted
            both = torch.cat((query, content), dim=-1), torch.cat((_repeat(key, query), _repeat(probe, query)), dim=-1)
            weights = _weights(*both, mask, scaling, softcap, key_scale)
            if not counted:  # the backward pass comes here again
                self._add_forward(query, key, value, weights)
                counted = True
            return _mix(weights, value)

        return checkpoint(attention, query, content, key, value, probe, use_reentrant=False, preserve_rng_state=False)

    def _add_forward(self, query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> None:
        with torch.no_grad():
            plain_query = unrotate(query[0].double(), self.cos, self.sin) / self.factors
            plain_key = unrotate(key[0].double(), self.cos, self.sin) / self.factors
            if self.stage == "noise":
                self.accumulator.add_noise(plain_key, value[0].double(), weights[0])
                return
            if self.stage == "held_out":
                self.accumulator.add_held_out(plain_key, value[0].double(), weights[0])
                return
            self.accumulator.add_forward(plain_query, plain_key, value[0].double(), weights[0], self.cos, self.sin)


def _repeat(x: Float[Tensor, "1 G S K"], query: Float[Tensor, "1 H S K"]) -> Float[Tensor, "1 H S K"]:
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    key_scale: Float[Tensor, "1 G S"] | None,
) -> Float[Tensor, "1 H S S"]:
    scores = query @ _repeat(key, query).transpose(2, 3) * scaling
    if key_scale is not None:
        scores = scores * _repeat(key_scale, query)[:, :, None]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.softmax(scores if mask is None else scores + mask, dim=-1, dtype=torch.float32).to(query.dtype)


def _mix(weights: Float[Tensor, "1 H S S"], value: Float[Tensor, "1 G S V"]) -> Float[Tensor, "1 S H V"]:
    return (weights @ _repeat(value, weights)).transpose(1, 2).contiguous()


def calibration_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    score_bias: Tensor | None = None,
    key_scale: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if score_bias is not None:
        attention_mask = score_bias if attention_mask is None else attention_mask + score_bias
    return module.calibration_recorder.attend(query, key, value, attention_mask, scaling, softcap, key_scale), None
