"""One walk over calibration text: a forward pass, and for Fisher weights a backward pass, into moments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from threading import Event
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mla_convert.calibrate.accumulate import LayerAccumulator
from mla_convert.calibrate.parallel import Stage, Steps, on_each, shares
from mla_convert.calibrate.recorder import LayerRecorder, calibration_attention
from mla_convert.calibrate.statistics import LayerStatistics
from mla_convert.errors import SourceError, StatisticsError
from mla_convert.maths.decouple import substitute_rotation
from mla_convert.progress import Progress, silent
from mla_convert.spec import SourceSpec

IMPLEMENTATION = "mla_convert_calibration"
# Share of the token contexts on which the constants that replace rotations are fitted; the rest then gathers the
# gradients of the content path that these constants define.
PAIR_SHARE = 0.25
# Chosen on held-out text of two domains; smaller follows the noise of sampled labels, larger ignores the gradients.
CONSTANT_DAMPING = 0.3

# With a choice to make, one in so many of those is set aside: a prime, so that of two to six texts that take turns
# each is among them.
HELD_OUT_EVERY = 7

# What a context's backward pass is for; those of CONTENT need the constants.
CONTENT = ("content", "held_out")
BACKWARD = ("pairs", *CONTENT)

_CHECK_SOURCE = "check the source's weights; `mla-convert evaluate SOURCE` shows whether it answers at all"


def collect(
    models: Any,
    spec: SourceSpec,
    windows: Int[Tensor, "n S"],
    *,
    gradients: bool,
    seed: int,
    held_out: bool = False,
    noise: Int[Tensor, "m S"] | None = None,
    progress: Progress | None = None,
) -> tuple[LayerStatistics, ...]:
    """Run the model over the token contexts and return the moments of every layer.

    With `gradients` the loss is the cross-entropy on labels sampled from the model's own predictions, so that the
    gradients' second moment is the Fisher information and not its empirical namesake (Kunstner et al., 2019,
    arXiv:1905.12558). The labels of a context depend on `seed` and the context's place alone. Gradients are taken at
    keys before RoPE and, through keys of value zero that are added without rotation, at the content keys of the
    converted model. The model's parameters keep no gradients.

    Args:
        models: a transformers decoder whose attention goes through the attention interface, in evaluation mode; or
            several of them with the same weights, on devices that share the contexts. The labels do not depend on how
            many, and the sums only in the order in which floats are added.
        windows: token ids, contexts of equal length from position 0.
        held_out: set some of the contexts aside, whose moments and content gradients are kept apart and count nowhere
            else; only with `gradients`.
        noise: contexts of tokens drawn uniformly from the vocabulary, of the same length.

    Raises:
        SourceError: the source's activations or gradients are not finite.
        StatisticsError: there are too few contexts to set one aside.
    """
    replicas = models if isinstance(models, Sequence) else (models,)
    stages = stages_of(len(windows), gradients, held_out)
    contexts = windows if noise is None else torch.cat((windows, noise))
    stages += [("noise", i) for i in range(len(windows), len(contexts))]
    sums = [[LayerAccumulator(spec) for _ in range(spec.num_layers)] for _ in replicas]
    steps = Steps(progress or silent, "calibrate", len(stages))
    with ExitStack() as stack:
        recorders = [
            stack.enter_context(_recording(model, spec, windows.shape[1], of))
            for model, of in zip(replicas, sums, strict=True)
        ]
        for part in parts_of(stages):
            if any(stage in CONTENT for stage, _ in part):
                fit_constants(sums, spec)
            dealt = shares(part, len(replicas))

            def work(device: int, stop: Event, dealt: list[list[Stage]] = dealt) -> None:
                for stage, i in dealt[device]:
                    if stop.is_set():
                        return
                    for recorder in recorders[device]:
                        recorder.begin(stage)
                    run_context(replicas[device], contexts[i : i + 1], stage in BACKWARD, sampling(seed, i))
                    for recorder in recorders[device]:
                        recorder.finish()
                    steps.step()

            on_each(len(replicas), work)
    for i, accumulator in enumerate(total(sums)):
        check_finite(i, accumulator)
    return tuple(accumulator.statistics() for accumulator in total(sums))


def parts_of(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Divide stages where all before must be done on every device: the constants are fitted to all pair gradients."""
    first = next((i for i, (stage, _) in enumerate(stages) if stage in CONTENT), len(stages))
    return [list(part) for part in (stages[:first], stages[first:]) if part]


def total(sums: Sequence[list[LayerAccumulator]]) -> list[LayerAccumulator]:
    """Return each layer's sums over devices; those of a single device as they are."""
    if len(sums) == 1:
        return sums[0]
    found = []
    for layer in zip(*sums, strict=True):
        both = copy(layer[0])
        for other in layer[1:]:
            both.add(other)
        found.append(both)
    return found


def check_finite(layer: int, accumulator: LayerAccumulator) -> None:
    """Raise SourceError where a layer's sums are not finite."""
    if not (accumulator.key_value.isfinite().all() and accumulator.content_gradients.isfinite().all()):
        raise SourceError(f"layer {layer} of the source gives activations that are not finite", _CHECK_SOURCE)


def sampling(seed: int, context: int) -> torch.Generator:
    """Return what draws the labels of a context: they depend on the seed and its place alone."""
    return torch.Generator(device="cpu").manual_seed((seed * 1_000_003 + context) % 2**63)


def stages_of(count: int, gradients: bool, held_out: bool) -> list[Stage]:
    """Return what each of `count` contexts is run for, and its place.

    Raises:
        StatisticsError: there are too few contexts to set one aside.
    """
    if not gradients:
        return [("forward", i) for i in range(count)]
    if count == 1 and not held_out:
        return [("pairs", 0), ("content", 0)]  # a single context serves both stages, one after the other
    first = max(1, math.ceil(PAIR_SHARE * count))
    if held_out and count - first < 2:
        raise StatisticsError(
            f"a calibration of {count} contexts leaves none to choose a damping by",
            "calibrate on more tokens, or give factorise.damping one number",
        )
    aside = range(first, count, HELD_OUT_EVERY) if held_out else ()
    return [("pairs" if i < first else "held_out" if i in aside else "content", i) for i in range(count)]


def fit_constants(sums: Sequence[list[LayerAccumulator]], spec: SourceSpec) -> None:
    """Fit the constants that replace rotations to the pair gradients so far, of all devices, and give them to each."""
    turning = spec.rope.dim // 2
    for i, accumulator in enumerate(total(sums)):
        fitted = substitute_rotation(
            accumulator.pair_moment(),
            spec.num_kv_heads,
            damping=CONSTANT_DAMPING,
            towards=accumulator.statistics().mean_rotation,
        )
        fitted.constants[:, turning:] = 1.0  # what never turned is replaced by itself
        for device in sums:
            device[i].constants = fitted.constants


def run_context(model: Any, window: Int[Tensor, "1 S"], backward: bool, generator: torch.Generator) -> None:
    """One forward pass, and a backward pass from the summed loss on sampled labels."""
    window = window.to(model.device)
    if not backward:
        with torch.no_grad():
            model.base_model(input_ids=window, use_cache=False)
        return
    with torch.enable_grad():
        embedded = model.get_input_embeddings()(window).detach().requires_grad_(True)
        hidden = model.base_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        loss_gradient_at_hidden(model, hidden, generator)


def loss_gradient_at_hidden(model: Any, hidden: Float[Tensor, "1 S D"], generator: torch.Generator) -> None:
    """Backward from Σ_t -log p(y_t), y_t ~ p: at the logits the gradient is p - onehot(y), so no graph is needed there.

    The head is applied to a block of positions at a time, because logits and their gradient are the largest tensors.
    """
    head = model.get_output_embeddings()
    scale = getattr(model.config, "logits_scale", 1.0)
    cap = getattr(model.config, "final_logit_softcap", None)
    gradient = torch.empty_like(hidden)
    with torch.no_grad():
        for start in range(0, hidden.shape[1], 128):
            rows = slice(start, start + 128)
            logits = head(hidden[0, rows]).float() * scale
            capped = logits if cap is None else cap * torch.tanh(logits / cap)
            probabilities = capped.softmax(-1)
            if not torch.isfinite(probabilities).all():
                raise SourceError("the source's predictions on the calibration text are not finite", _CHECK_SOURCE)
            labels = _sample(probabilities, generator)
            at_logits = probabilities.scatter_add_(1, labels, torch.full_like(probabilities[:, :1], -1.0))
            if cap is not None:
                at_logits = at_logits * (1.0 - (capped / cap).square())
            gradient[0, rows] = (at_logits * scale).to(head.weight.dtype) @ head.weight
    hidden.backward(gradient)


def _sample(probabilities: Float[Tensor, "S vocabulary"], generator: torch.Generator) -> Int[Tensor, "S 1"]:
    """Draw one label for each row by inverting the distribution function: one random number a row."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    drawn = torch.rand(len(probabilities), 1, dtype=torch.float64, generator=generator).to(probabilities.device)
    return torch.searchsorted(cumulative, drawn * cumulative[:, -1:]).clamp_max(probabilities.shape[1] - 1)


@contextmanager
def recording_attention(model: Any) -> Iterator[None]:
    """Within it, every layer's attention goes to its ``calibration_recorder``."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, calibration_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _recording(
    model: Any, spec: SourceSpec, context: int, accumulators: list[LayerAccumulator]
) -> Iterator[list[LayerRecorder]]:
    """Give every layer's attention a recorder; on leaving, the model is as it was."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    attentions = [layer.self_attn for layer in model.base_model.layers]
    recorders = [LayerRecorder(spec, i, context, model.device, sums) for i, sums in enumerate(accumulators)]
    with recording_attention(model):
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            for attention, recorder in zip(attentions, recorders, strict=True):
                attention.calibration_recorder = recorder
            yield recorders
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
            for attention in attentions:
                if hasattr(attention, "calibration_recorder"):
                    del attention.calibration_recorder
