"""One walk over calibration text: a forward pass, and for Fisher weights a backward pass, into moments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mla_convert.calibrate.accumulate import LayerAccumulator
from mla_convert.calibrate.statistics import LayerStatistics
from mla_convert.errors import SourceError, StatisticsError
from mla_convert.maths.decouple import substitute_rotation
from mla_convert.maths.rope import unrotate
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

_CHECK_SOURCE = "check the source's weights; `mla-convert evaluate SOURCE` shows whether it answers at all"


def collect(
    model: Any,
    spec: SourceSpec,
    windows: Int[Tensor, "n S"],
    *,
    gradients: bool,
    seed: int,
    held_out: bool = False,
    noise: Int[Tensor, "m S"] | None = None,
    progress: Progress | None = None,
) -> tuple[LayerStatistics, ...]:
    """Run `model` over the token contexts and return the moments of every layer.

    With `gradients` the loss is the cross-entropy on labels sampled from the model's own predictions, so that the
    gradients' second moment is the Fisher information and not its empirical namesake (Kunstner et al., 2019,
    arXiv:1905.12558). The labels of a context depend on `seed` and the context's place alone. Gradients are taken at
    keys before RoPE and, through keys of value zero that are added without rotation, at the content keys of the
    converted model. The model's parameters keep no gradients.

    Args:
        model: a transformers decoder whose attention goes through the attention interface; in evaluation mode.
        windows: token ids, contexts of equal length from position 0.
        held_out: set some of the contexts aside, whose moments and content gradients are kept apart and count nowhere
            else; only with `gradients`.
        noise: contexts of tokens drawn uniformly from the vocabulary, of the same length.

    Raises:
        SourceError: the source's activations or gradients are not finite.
        StatisticsError: there are too few contexts to set one aside.
    """
    progress = progress or silent
    accumulators = [LayerAccumulator(spec) for _ in range(spec.num_layers)]
    stages = _stages(len(windows), gradients, held_out)
    contexts = windows if noise is None else torch.cat((windows, noise))
    stages += [("noise", i) for i in range(len(windows), len(contexts))]
    with _recording(model, spec, windows.shape[1]) as recorders:
        for done, (stage, i) in enumerate(stages):
            if stage in ("content", "held_out") and accumulators[0].constants is None:
                _fit_constants(accumulators, spec)
            for recorder, accumulator in zip(recorders, accumulators, strict=True):
                recorder.begin(stage, accumulator)
            generator = torch.Generator(device="cpu").manual_seed((seed * 1_000_003 + i) % 2**63)
            run_context(model, contexts[i : i + 1], stage in ("pairs", "content", "held_out"), generator)
            for recorder in recorders:
                recorder.finish()
            progress("calibrate", done + 1, len(stages))
    for i, accumulator in enumerate(accumulators):
        if not (accumulator.key_value.isfinite().all() and accumulator.content_gradients.isfinite().all()):
            raise SourceError(f"layer {i} of the source gives activations that are not finite", _CHECK_SOURCE)
    return tuple(accumulator.statistics() for accumulator in accumulators)


def _stages(count: int, gradients: bool, held_out: bool) -> list[tuple[str, int]]:
    """What each of `count` contexts is run for, and its place."""
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


def _fit_constants(accumulators: list[LayerAccumulator], spec: SourceSpec) -> None:
    turning = spec.rope.dim // 2
    for accumulator in accumulators:
        fitted = substitute_rotation(
            accumulator.pair_moment(),
            spec.num_kv_heads,
            damping=CONSTANT_DAMPING,
            towards=accumulator.statistics().mean_rotation,
        )
        accumulator.constants = fitted.constants
        accumulator.constants[:, turning:] = 1.0  # what never turned is replaced by itself


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
        _loss_gradient_at_hidden(model, hidden, generator)


def _loss_gradient_at_hidden(model: Any, hidden: Float[Tensor, "1 S D"], generator: torch.Generator) -> None:
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


class _LayerRecorder:
    """Stands in for one layer's attention function, and hands what passes through it to an accumulator."""

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


def _calibration_attention(
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


@contextmanager
def _recording(model: Any, spec: SourceSpec, context: int) -> Iterator[list[_LayerRecorder]]:
    """Route every layer's attention through a recorder; on leaving, the model is as it was."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _calibration_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    before = model.config._attn_implementation
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    attentions = [layer.self_attn for layer in model.base_model.layers]
    recorders = [_LayerRecorder(spec, i, context, model.device) for i in range(len(attentions))]
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        for parameter in trained:
            parameter.requires_grad_(False)
        for attention, recorder in zip(attentions, recorders, strict=True):
            attention.calibration_recorder = recorder
        yield recorders
    finally:
        model.set_attn_implementation(before)
        for parameter in trained:
            parameter.requires_grad_(True)
        for attention in attentions:
            if hasattr(attention, "calibration_recorder"):
                del attention.calibration_recorder
