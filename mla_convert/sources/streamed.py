"""A source's decoder one layer at a time, for models that do not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mla_convert.sources.decoder import empty_decoder, fill_decoder

if TYPE_CHECKING:
    from mla_convert.sources.source import Source


class StreamedDecoder:
    """What `Source.load_decoder` returns, whose weights are read when they are needed and dropped right after.

    In float32 and without gradients of its weights. Its memory is that of a layer, or of the rows of the embedding that
    a text needs, or of the output head.

    Attributes:
        device: where the weights are read to.
        model: the decoder, on the meta device but for its frequencies and for what is at work.
    """

    def __init__(self, source: Source, device: torch.device | str = "cpu") -> None:
        self._source = source
        self.device = torch.device(device)
        self.model = empty_decoder(source.spec, torch.float32, self.device)
        self.model.requires_grad_(False)

    @torch.no_grad()
    def embed(self, tokens: Int[Tensor, "n S"]) -> Iterator[Float[Tensor, "1 S D"]]:
        """Yield the hidden states before the first layer, a context at a time."""
        inner = self.model.model
        used, places = tokens.unique(return_inverse=True)
        for name, part in self._source.copied(None):
            if part.target == "model.embed_tokens.weight":
                rows = part.take(self._source.tensor(name))[used]
                inner.embed_tokens.weight = nn.Parameter(rows.to(self.device, torch.float32), requires_grad=False)
        beside = ("embed_positions", "embed_norm")
        others = {f"model.{name}" for name, _ in inner.named_parameters() if name.startswith(beside)}
        fill_decoder(self.model, self._source, None, torch.float32, self.device, others)
        positions = torch.arange(tokens.shape[1], device=self.device)[None]
        for row in places.split(1):
            yield inner.embed(inner.embed_tokens(row.to(self.device)), positions)
        for module in (inner.embed_tokens, inner.embed_positions, inner.embed_norm):
            if module is not None:
                module.to("meta")

    @contextmanager
    def layer(self, index: int) -> Iterator[Any]:
        """Within it, the layer has its weights."""
        fill_decoder(self.model, self._source, index, torch.float32, self.device)
        layer = self.model.model.layers[index]
        layer.requires_grad_(False)
        try:
            yield layer
        finally:
            layer.self_attn = nn.Identity()  # whatever stood there, with all that it held
            layer.to("meta")

    @contextmanager
    def head(self) -> Iterator[Any]:
        """Within it, the model has its final norm and its output head."""
        tied = self._source.spec.tie_word_embeddings
        names = {f"model.norm.{name}" for name, _ in self.model.model.norm.named_parameters()}
        names.add("model.embed_tokens.weight" if tied else "lm_head.weight")
        embedding = self.model.model.embed_tokens.weight
        if tied:  # the rows of the last text may be there still
            shape = self._source.spec.vocab_size, self._source.spec.hidden_size
            self.model.model.embed_tokens.weight = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        fill_decoder(self.model, self._source, None, torch.float32, self.device, names)
        if tied:
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
        self.model.model.norm.requires_grad_(False)
        self.model.lm_head.requires_grad_(False)
        try:
            yield self.model
        finally:
            self.model.model.norm.to("meta")
            self.model.lm_head.to("meta")
            if tied:
                self.model.model.embed_tokens.weight = embedding
