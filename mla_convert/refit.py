"""Refits: each layer converted for what the converted layers before it make of the text, in closed form.

Two streams of hidden states pass the layers in order: the source's own, h_T, and h_S, of the source with every layer
before converted. The source's keys and values are wanted for x_S = norm(h_S) too, so W_K and W_V become the ridge
regression of W x_T on x_S, and the layer is converted from these. What the heads u then read is put together by the
ridge regression of the source's attention output a_T on u, in place of W_O. Ridges pull towards the weights that were
there. Tokens count by 1/‖h_T + a_T‖², as in healing, and where a norm stands between a_T and what is added to h_T, by
what is added. One layer of each model is at work at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mla_convert.heal.layers import LayerCall
from mla_convert.maths.refit import ridge_refit, token_weights
from mla_convert.mla import MLAConfig, MLAWeights
from mla_convert.mla.attention_mla import MLAAttention
from mla_convert.mla.modeling_mla import MLARotaryEmbedding
from mla_convert.mla.names import to_hf
from mla_convert.mla.spec_fields import attention_fields, rope_fields
from mla_convert.progress import Progress, silent
from mla_convert.recipe import RefitRecipe
from mla_convert.sources import Source
from mla_convert.sources.attention import AttentionWeights
from mla_convert.sources.streamed import StreamedDecoder
from mla_convert.spec import SourceSpec

# A token's weight against the median one's, at most.
MOST_WEIGHT = 4.0
_BATCH = 4  # contexts at a time

# Hidden states [n S D] of the source, and of the source with every layer before converted.
Streams = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerRefit:
    """What takes the place of a layer's weights; float32, None where the source's stand.

    Attributes:
        key_value: [W_K; W_V], with a last column of biases where the source has any.
        output: W_O, likewise.
        error: Σ w ‖output - a_T‖² / Σ w ‖a_T‖² of the layer's attention on the tokens of the refit; None without one.
    """

    key_value: Float[Tensor, "J D1"] | None = None
    output: Float[Tensor, "D I1"] | None = None
    error: float | None = None

    @property
    def errors(self) -> dict[str, float]:
        """The error under the name that the record gives it."""
        return {} if self.error is None else {"attention": self.error}

    def source(self, attention: AttentionWeights) -> AttentionWeights:
        """Return the source's layer with its keys and values refitted: what is to be converted."""
        if self.key_value is None:
            return attention
        groups, dim, width = attention.w_k.shape
        w_k, w_v = self.key_value[:, :width].unflatten(0, (2, groups, dim))
        if self.key_value.shape[1] == width:
            return replace(attention, w_k=w_k, w_v=w_v)
        b_k, b_v = self.key_value[:, width].unflatten(0, (2, groups, dim))
        return replace(attention, w_k=w_k, w_v=w_v, b_k=b_k, b_v=b_v)

    def converted(self, weights: MLAWeights) -> MLAWeights:
        """Return the converted layer with its output projection refitted."""
        if self.output is None:
            return weights
        heads, dim = weights.w_o.shape[1:]
        output = self.output.to(weights.w_o.dtype)
        w_o = output[:, : heads * dim].unflatten(1, (heads, dim))
        return replace(weights, w_o=w_o, b_o=None if weights.b_o is None else output[:, -1])


@torch.no_grad()
def refit_layers(
    source: Source,
    contexts: Int[Tensor, "n S"],
    recipe: RefitRecipe,
    convert: Callable[[int, LayerRefit], MLAWeights],
    progress: Progress | None = None,
    *,
    resume: tuple[int, Streams] | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[LayerRefit, Streams]]:
    """Yield every layer's refit, fitted in order over token contexts of equal length from position 0.

    With it comes what both models' hidden states are after the layer. One layer is in memory at a time.

    Args:
        convert: gives the MLA weights of a layer under a refit.
        resume: the layer to go on with, and the hidden states before it.
        device: where layers compute; hidden states, and what is returned, are on the CPU.
    """
    progress = progress or silent
    decoder = StreamedDecoder(source, device)
    call = LayerCall(decoder.model, contexts[:1])
    if resume is None:
        embedded = torch.cat([row.cpu() for row in decoder.embed(contexts)])
        resume = 0, (embedded, embedded)
    first, streams = resume
    for i in range(first, source.spec.num_layers):
        with decoder.layer(i) as layer:
            refit, streams = _refit_layer(layer, call, streams, source, recipe, convert, i, decoder.device)
        progress("refit", i + 1, source.spec.num_layers)
        yield refit, streams


def _refit_layer(
    layer: Any,
    call: LayerCall,
    streams: Streams,
    source: Source,
    recipe: RefitRecipe,
    convert: Callable[[int, LayerRefit], MLAWeights],
    index: int,
    device: torch.device,
) -> tuple[LayerRefit, Streams]:
    """Return the layer's refit, and both models' hidden states after it; the layer is left with other attention."""
    h_T, h_S = streams
    a_T = _through(lambda h: call.attend(layer, h, index), h_T, device)
    added = _through(layer.added, a_T, device)
    weight = token_weights(h_T + added, most=MOST_WEIGHT)
    if layer.attention_output_layernorm is not None:  # an error of the output counts as much as is added of it
        weight = weight * added.square().sum(-1) / a_T.square().sum(-1).clamp_min(1e-30)
    refit = LayerRefit()
    if recipe.inputs > 0 and index > 0:  # the first layer's inputs are the source's
        read = layer.attention_input
        rows = ((read(t), read(s), w) for t, s, w in _batches(device, h_T, h_S, weight))
        refit = replace(refit, key_value=_refit_inputs(source.attention(index), rows, recipe.inputs))
    h_T = _through(lambda h: call(layer, h, index), h_T, device)

    weights = convert(index, refit)
    layer.self_attn = converted = ConvertedAttention(weights, source.spec).to(device)
    if recipe.outputs > 0:
        rows = (
            (t, converted.heads(lambda s=s: call.attend(layer, s, index)), w)
            for t, s, w in _batches(device, a_T, h_S, weight)
        )
        refit = replace(refit, output=_refit_output(weights, rows, recipe.outputs))
        layer.self_attn = converted = ConvertedAttention(refit.converted(weights), source.spec).to(device)
    outputs: list[Tensor] = []
    converted.register_forward_hook(lambda _module, _given, found: outputs.append(found[0].cpu()))
    h_S = _through(lambda h: call(layer, h, index), h_S, device)
    missed = (torch.cat(outputs) - a_T).double().square().sum(-1) * weight
    energy = a_T.double().square().sum(-1) * weight
    error = (missed.sum() / energy.sum()).item() if energy.sum() > 0 else 0.0
    return replace(refit, error=error), (h_T, h_S)


class ConvertedAttention(nn.Module):
    """A converted layer's attention in float32, in place of the source layer's own."""

    def __init__(self, weights: MLAWeights, spec: SourceSpec) -> None:
        super().__init__()
        shape, tensors = weights.shape, to_hf(weights.to(torch.float32))
        config = MLAConfig(
            num_hidden_layers=1,
            hidden_size=spec.hidden_size,
            num_attention_heads=spec.num_heads,
            kv_lora_rank=shape.kv_rank,
            qk_rope_head_dim=shape.rope_dim,
            qk_nope_head_dim=shape.nope_dim,
            v_head_dim=shape.value_dim,
            rope_inv_freq=[list(weights.inv_freq)],
            query_bias="q_proj.bias" in tensors or "q_a_proj.bias" in tensors,
            key_norm_bias="k_norm_proj.bias" in tensors,
            latent_bias="kv_a_proj_with_mqa.bias" in tensors,
            output_bias="o_proj.bias" in tensors,
            **attention_fields(spec),
            **rope_fields([spec.rope], [weights.pairs]),
        )
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            self.attention = MLAAttention(config, 0)
        self.attention.load_state_dict(tensors, assign=True)
        self.rotary_emb = MLARotaryEmbedding(config)

    def forward(
        self,
        hidden_states: Float[Tensor, "B S D"],
        attention_mask: Tensor | None = None,
        score_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Float[Tensor, "B S D"], Tensor | None]:
        """Return the attention's output; the mask is transformers', positions count from 0."""
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        turns = self.rotary_emb(positions, hidden_states.dtype)[0]
        return self.attention(hidden_states, turns, attention_mask, score_bias=score_bias)

    def heads(self, run: Callable[[], object]) -> Float[Tensor, "B S I"]:
        """Return what the output projection is given while `run` runs the layer once, [B S H·V]."""
        caught: list[Tensor] = []
        handle = self.attention.o_proj.register_forward_pre_hook(lambda _module, given: caught.append(given[0]))
        try:
            run()
        finally:
            handle.remove()
        return caught[0]


def _refit_inputs(
    attention: AttentionWeights, rows: Iterable[tuple[Tensor, ...]], ridge: float
) -> Float[Tensor, "J D1"]:
    """[W_K; W_V], and their biases, from rows (x_T, x_S, w): what is wanted is the source's answer to x_T."""
    stacked = torch.cat((attention.w_k.flatten(0, 1), attention.w_v.flatten(0, 1))).float()
    biased = attention.b_k is not None or attention.b_v is not None
    if biased:
        biases = [
            torch.zeros(w.shape[:2]) if b is None else b.float()
            for w, b in ((attention.w_k, attention.b_k), (attention.w_v, attention.b_v))
        ]
        stacked = torch.cat((stacked, torch.cat(biases).flatten()[:, None]), dim=1)
        rows = ((_with_one(t), _with_one(s), w) for t, s, w in rows)
    inputs, moment = _moments(rows)
    stacked = stacked.to(inputs.device)
    return ridge_refit(stacked, stacked.double() @ inputs, moment, ridge=ridge).cpu()


def _refit_output(weights: MLAWeights, rows: Iterable[tuple[Tensor, ...]], ridge: float) -> Float[Tensor, "D I1"]:
    """W_O, and its bias, from rows (a_T, u, w)."""
    output = weights.w_o.float().flatten(1)
    if weights.b_o is not None:
        output = torch.cat((output, weights.b_o.float()[:, None]), dim=1)
        rows = ((t, _with_one(u), w) for t, u, w in rows)
    cross, moment = _moments(rows)
    return ridge_refit(output.to(moment.device), cross, moment, ridge=ridge).cpu()


def _moments(rows: Iterable[tuple[Tensor, ...]]) -> tuple[Float[Tensor, "J I"], Float[Tensor, "I I"]]:
    """E[t u^T] and E[u u^T] in float64, from batches of t [B S J], u [B S I] and the tokens' weights [B S]."""
    sums: list[Tensor] = []
    for t, u, w in rows:
        t, u = t.flatten(0, 1).double(), u.flatten(0, 1).double()
        weighted = u * w.flatten()[:, None]
        terms = (t.mT @ weighted, u.mT @ weighted, w.sum())
        sums = [before + term for before, term in zip(sums, terms, strict=True)] if sums else list(terms)
    cross, moment, total = sums
    return cross / total, moment / total


def _with_one(x: Float[Tensor, "B S I"]) -> Float[Tensor, "B S I1"]:
    return torch.cat((x, x.new_ones(*x.shape[:2], 1)), dim=-1)


def _batches(device: torch.device, *rows: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Some contexts at a time, on the device."""
    for parts in zip(*(part.split(_BATCH) for part in rows), strict=True):
        yield tuple(part.to(device) for part in parts)


def _through(function: Callable[[Tensor], Tensor], rows: Tensor, device: torch.device) -> Tensor:
    """What a function on the device makes of rows on the CPU, some contexts at a time."""
    return torch.cat([function(part.to(device)).cpu() for part in rows.split(_BATCH)])
