"""What stands in for a layer's attention while it calibrates: it attends as the source does, and notes what passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mla_convert.calibrate.accumulate import LayerAccumulator, Seen
from mla_convert.maths.rope import unrotate
from mla_convert.spec import SourceSpec

# Queries that attend at a time.
BLOCK = 128


class LayerRecorder:
    """Stands in for one layer's attention function, and hands what passes through it to an accumulator.

    Its stage says what is noted: ``forward`` (queries, keys, values and weights), ``pairs``, ``content``, ``held_out``
    (these, and the loss's gradients), ``noise``, and ``plain`` (nothing).
    """

    def __init__(
        self, spec: SourceSpec, layer: int, context: int, device: torch.device, accumulator: LayerAccumulator
    ) -> None:
        self.spec = spec
        self.accumulator = accumulator
        rope = spec.rope_of(layer)
        positions = torch.arange(context, dtype=torch.float64, device=device)
        angles = positions[:, None] * torch.tensor(rope.inv_freq, dtype=torch.float64, device=device)
        self.cos, self.sin = angles.cos(), angles.sin()
        # What the source multiplies each dim of queries and keys by when it turns them.
        self.factors = torch.tensor(rope.factors * 2, dtype=torch.float64, device=device)

        self.stage = "forward"
        self.leaves: tuple[Tensor, Tensor, Tensor] | None = None  # key, value and probe, whose gradients are wanted

    def begin(self, stage: str) -> None:
        """Say what is noted of the next context."""
        self.stage, self.leaves = stage, None

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
            return self._attention(query, key, value, _Scores(mask, scaling, softcap, None))[0]
        if key_scale is not None:  # what is recorded is linear in the layer's input: keys before their norm
            key = key / key_scale[..., None]
        scores = _Scores(mask, scaling, softcap, key_scale)
        if self.stage in ("forward", "noise"):
            out, seen = self._attention(query, key, value, scores, note=True)
            self._add_forward(query, key, value, seen)
            return out
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
            out, seen = self._attention(*both, value, scores, note=not counted)
            if not counted:  # the backward pass comes here again
                self._add_forward(query, key, value, seen)
                counted = True
            return out

        return checkpoint(attention, query, content, key, value, probe, use_reentrant=False, preserve_rng_state=False)

    def _attention(
        self,
        query: Float[Tensor, "1 H S K"],
        key: Float[Tensor, "1 G S K"],
        value: Float[Tensor, "1 G S V"],
        scores: _Scores,
        *,
        note: bool = False,
    ) -> tuple[Float[Tensor, "1 S H V"], Seen | None]:
        """Attend as the source does; with `note`, also return what the weights add up to.

        A block of queries at a time, each with the keys up to its last: of what causality masks little is computed.
        """
        length = query.shape[2]
        turns = torch.cat((self.cos, self.sin), dim=1).to(query.dtype)
        received = torch.zeros(length, dtype=torch.float64, device=query.device)
        outputs, ahead = [], []
        query, key, value = query * scores.scaling, _repeat(key, query), _repeat(value, query)
        for start in range(0, length, BLOCK):
            rows = slice(start, start + BLOCK)
            stop = length if scores.mask is None else min(start + BLOCK, length)
            weights = scores.weights(query[:, :, rows] @ key[:, :, :stop].transpose(2, 3), rows)
            outputs.append((weights @ value[:, :, :stop]).transpose(1, 2))
            if note:
                with torch.no_grad():
                    received[:stop] += weights[0].square().sum((0, 1)).double()
                    ahead.append(weights[0] @ turns[:stop])
        seen = None
        if note:
            seen = Seen(received, *torch.cat(ahead, dim=1).double().chunk(2, dim=-1))
        return torch.cat(outputs, dim=1), seen

    def _add_forward(self, query: Tensor, key: Tensor, value: Tensor, seen: Seen | None) -> None:
        assert seen is not None  # it was asked for
        with torch.no_grad():
            plain_query = unrotate(query[0].double(), self.cos, self.sin) / self.factors
            plain_key = unrotate(key[0].double(), self.cos, self.sin) / self.factors
            if self.stage == "noise":
                self.accumulator.add_noise(plain_key, value[0].double(), seen)
                return
            if self.stage == "held_out":
                self.accumulator.add_held_out(plain_key, value[0].double(), seen)
                return
            self.accumulator.add_forward(plain_query, plain_key, value[0].double(), seen, self.cos, self.sin)


@dataclass(frozen=True)
class _Scores:
    """What becomes of the products of queries and keys."""

    mask: Float[Tensor, "1 heads S S"] | None
    scaling: float
    softcap: float | None
    key_scale: Float[Tensor, "1 G S"] | None

    def weights(self, products: Float[Tensor, "1 H n T"], rows: slice) -> Float[Tensor, "1 H n T"]:
        """The attention weights of some queries on the first T keys, from their products that are scaled."""
        heads, stop = products.shape[1], products.shape[3]
        if self.key_scale is not None:
            scale = self.key_scale[:, :, :stop].repeat_interleave(heads // self.key_scale.shape[1], dim=1)
            products = products * scale[:, :, None]
        if self.softcap is not None:
            products = self.softcap * torch.tanh(products / self.softcap)
        if self.mask is not None:
            products += self.mask[..., rows, :stop]  # in place: no operation before needs what it returned
        return torch.softmax(products, dim=-1, dtype=torch.float32).to(products.dtype)


def _repeat(x: Float[Tensor, "1 G S K"], query: Float[Tensor, "1 H S K"]) -> Float[Tensor, "1 H S K"]:
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


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
