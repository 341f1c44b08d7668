"""Stage ``layers``: every layer's MLA weights are trained against the source layer's attention output.

Layers are healed in order. The teacher's layer reads the teacher's own hidden states h_T, the student's what the healed
layers before it make of the text, h_S, and is asked for the teacher's output, attention_T(h_T). Asking for h_T +
attention_T(h_T) - h_S instead, which would undo the errors of the layers before as well, did not carry over to other
text: most of that difference cannot be told from h_S. A token's error counts as a share of its hidden state's energy,
since whatever reads the hidden states normalises them first; else the few tokens with huge activations would be all
that counts. One layer of each model is at work at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import get_scheduler

from mla_convert.errors import HealError
from mla_convert.heal.optimisers import Kind, make_optimisers
from mla_convert.maths.linalg import damped_power
from mla_convert.progress import Progress, silent

# Of the metric of errors, as a share of its mean eigenvalue: sampled labels leave directions that look free.
METRIC_DAMPING = 0.1


@dataclass(frozen=True)
class LayerSettings:
    """How each layer is trained.

    Attributes:
        steps: optimiser steps a layer.
        batch: contexts a step.
        optimizer: ``muon`` for matrices, with AdamW for biases, or ``adamw``.
        learning_rate: the peak of the cosine.
        metric: what an error is measured by: ``fisher`` (the loss's gradients, `heal.gradients`) or ``identity``.
        bf16: compute the steps in bfloat16; weights, hidden states and errors stay in float32.
        seed: of the order of the contexts.
    """

    steps: int = 200
    batch: int = 4
    optimizer: Kind = "muon"
    learning_rate: float = 3e-3
    metric: Literal["fisher", "identity"] = "identity"
    bf16: bool = False
    seed: int = 0


@dataclass(frozen=True)
class LayerResult:
    """One layer's errors: Σ w ‖output - attention_T‖² / Σ w ‖attention_T‖², with w = 1 / ‖h_T + attention_T‖².

    The norms are the metric's; w is the same for all.

    Attributes:
        layer: its index.
        first, last: the mean of the first and of the last tenth of the steps, on contexts it was trained on.
        held_out_before, held_out_after: on the others, before and after training.
        kept: whether the trained weights are better on the held-out contexts, and so were kept.
    """

    layer: int
    first: float
    last: float
    held_out_before: float
    held_out_after: float
    kept: bool


@dataclass
class Streams:
    """Hidden states [n L D] of both models before a layer, on training and held-out contexts."""

    teacher: Tensor
    student: Tensor
    held_out: int

    @property
    def training(self) -> int:
        """How many contexts are trained on; the held-out ones follow."""
        return self.teacher.shape[0] - self.held_out


def heal_layers(
    student: Any,
    teacher: Any,
    contexts: Tensor,
    held_out: Tensor,
    settings: LayerSettings,
    *,
    finished: Callable[[LayerResult, dict[str, Tensor], Streams], None] | None = None,
    metrics: Sequence[Float[Tensor, "D D"]] | None = None,
    resume: tuple[int, Streams] | None = None,
    progress: Progress | None = None,
) -> Iterator[LayerResult]:
    """Train the student's attention layers in order, in place, and yield each layer's result when it is done.

    Args:
        student: a native model; teacher: the decoder of the source it was made from, or another native model. Both in
            evaluation mode and on one device.
        contexts, held_out: token ids [n L] and [m L].
        metrics: each layer's metric of errors, whatever the settings say; None for the identity.
        finished: called with a layer's result, its new weights and the hidden states before the next layer.
        resume: the layer to go on with, and the hidden states before it.

    Raises:
        HealError: a loss that is not finite.
    """
    report = progress or silent
    teacher_layers, student_layers = layers_of(teacher), layers_of(student)
    count = len(student_layers)
    tokens = torch.cat([contexts, held_out])
    with torch.no_grad():
        teacher_call, student_call = LayerCall(teacher, tokens[:1]), LayerCall(student, tokens[:1])
        if resume is None:
            first = 0
            streams = Streams(embed(teacher, tokens), embed(student, tokens), len(held_out))
        else:
            first, streams = resume
    for i in range(first, count):
        report("layers", i, count)
        metric = None if metrics is None else metrics[i]
        target = _target(teacher_layers[i], teacher_call, streams, i, metric)
        result = _heal_layer(student_layers[i], student_call, streams, target, settings, i)
        with torch.no_grad():
            streams = Streams(
                _through(lambda h, i=i: teacher_call(teacher_layers[i], h, i), streams.teacher),
                _through(lambda h, i=i: student_call(student_layers[i], h, i), streams.student),
                streams.held_out,
            )
        if finished is not None:
            attention = student_layers[i].self_attn
            finished(result, {name: value.detach() for name, value in attention.named_parameters()}, streams)
        yield result
    report("layers", count, count)


def layers_of(model: Any) -> Sequence[Any]:
    """Return a decoder model's layers."""
    return model.get_decoder().layers


def embed(model: Any, tokens: Tensor) -> Tensor:
    """Return the hidden states [n L D] before the first layer."""
    return _through(LayerCall(model, tokens[:1]).embed, tokens)


class LayerCall:
    """Calls a native model's decoder layers one at a time, with what its own forward pass would give them.

    All contexts are equally long, unpadded and from position 0, so the same arguments serve each.
    """

    def __init__(self, model: Any, context: Tensor) -> None:
        self._inner = model.get_decoder()
        device = self._inner.rotary_emb.inv_freq.device
        self._positions = torch.arange(context.shape[1], device=device)[None]
        like = torch.empty(*self._positions.shape, 0, dtype=model.dtype, device=device)
        self._arguments = self._inner.layer_arguments(like, None, self._positions)

    def __call__(self, layer: nn.Module, hidden: Tensor, index: int) -> Tensor:
        """Return the layer's output [b L D] for hidden states [b L D]."""
        return layer(hidden, **self._arguments[index])

    def attention(self, layer: Any, hidden: Tensor, index: int) -> Tensor:
        """Return what the layer's attention adds to the hidden states [b L D]: norms and projections included."""
        return layer.added(self.attend(layer, hidden, index))

    def attend(self, layer: Any, hidden: Tensor, index: int) -> Tensor:
        """Return the output of the layer's attention [b L D], before any norm on it."""
        return layer.attend(hidden, **self._arguments[index])

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the hidden states before the first layer, [b L D], for token ids [b L]."""
        return self._inner.embed(self._inner.embed_tokens(tokens), self._positions)


def _through(function: Callable[[Tensor], Tensor], rows: Tensor, batch: int = 4) -> Tensor:
    return torch.cat([function(part) for part in rows.split(batch)])


@dataclass(frozen=True)
class Target:
    """What is wanted of the student's attention.

    Attributes:
        output: [n L D].
        weight: of each token's squared error, [n L 1], so that the teacher's own attention output weighs 1 on average.
        root: what an error is multiplied by before it is squared, [D D]; None for the identity.
    """

    output: Tensor
    weight: Tensor
    root: Tensor | None = None

    def error(self, output: Tensor, part: Any) -> Tensor:
        """Return the weighted mean squared error of ``output`` for some of the contexts, a scalar."""
        error = output - self.output[part]
        if self.root is not None:
            error = error @ self.root
        return (self.weight[part] * error.square()).mean()


@torch.no_grad()
def _target(layer: nn.Module, call: LayerCall, streams: Streams, index: int, metric: Tensor | None) -> Target:
    attended = _through(lambda h: call.attention(layer, h, index), streams.teacher)
    weight = 1.0 / (attended + streams.teacher).square().mean(dim=-1, keepdim=True).clamp_min(1e-12)
    root = None
    if metric is not None:
        root = damped_power(metric.double(), 0.5, METRIC_DAMPING).to(attended.dtype)
    energy = (attended if root is None else attended @ root).square()
    weight /= (weight * energy)[: streams.training].mean().clamp_min(1e-30)
    return Target(attended, weight, root)


def _heal_layer(
    layer: Any, call: LayerCall, streams: Streams, target: Target, settings: LayerSettings, index: int
) -> LayerResult:
    attention = layer.self_attn
    original = {name: value.detach().clone() for name, value in attention.named_parameters()}
    order = torch.Generator().manual_seed(settings.seed * 1_000_003 + index)
    optimisers = make_optimisers(
        dict(attention.named_parameters()), kind=settings.optimizer, learning_rate=settings.learning_rate
    )
    schedules = [
        get_scheduler("cosine", optimiser, num_warmup_steps=settings.steps // 20, num_training_steps=settings.steps)
        for optimiser in optimisers
    ]
    before = _held_out_error(layer, call, streams, target, index)
    losses = []
    for _ in range(settings.steps):
        chosen = torch.randperm(streams.training, generator=order)[: settings.batch]
        with torch.enable_grad():
            with torch.autocast(streams.student.device.type, torch.bfloat16, enabled=settings.bf16):
                output = call.attention(layer, streams.student[chosen], index)
            loss = target.error(output.float(), chosen)
            attention.zero_grad()
            loss.backward()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            _restore(attention, original)
            raise HealError(
                f"the loss of layer {index} is {losses[-1]}",
                "start again with a lower learning rate and another output; the layers before it stay as they are",
            )
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
    after = _held_out_error(layer, call, streams, target, index)
    kept = after < before
    if not kept:
        _restore(attention, original)
    tenth = max(1, settings.steps // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    return LayerResult(index, first, last, before, after, kept)


def _restore(attention: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in attention.named_parameters():
            value.copy_(weights[name])


@torch.no_grad()
def _held_out_error(layer: Any, call: LayerCall, streams: Streams, target: Target, index: int) -> float:
    held_out = slice(streams.training, None)
    output = _through(lambda h: call.attention(layer, h, index), streams.student[held_out])
    return target.error(output, held_out).item()
