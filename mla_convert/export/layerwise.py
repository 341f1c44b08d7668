"""Verification of a written folder a layer at a time, for models that do not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from mla_convert.errors import VerificationError
from mla_convert.export.reference import PaperAttention
from mla_convert.export.reload import ReloadCheck, check_tolerance, compare_logits
from mla_convert.memory import release_freed_memory
from mla_convert.mla import MLAConfig, MLAForCausalLM, MLAWeights
from mla_convert.mla.modeling_mla import MLARotaryEmbedding
from mla_convert.sources import Source
from mla_convert.sources.checkpoint import Checkpoint
from mla_convert.sources.safetensors_reader import open_safetensors
from mla_convert.sources.streamed import StreamedDecoder

_REMEDY = "file an issue with the conversion.json of the folder"


@torch.no_grad()
def verify_layerwise(
    source: Source,
    weights: Callable[[int], MLAWeights],
    folder: Path,
    input_ids: Int[Tensor, "1 S"],
    *,
    dtype: torch.dtype,
    tolerance: float,
) -> ReloadCheck:
    """Compare a written native folder with the source's decoder around the converted attention; return the differences.

    The same as `verify_folder` on `reference_logits`, but that both models pass their layers together, one in memory at
    a time, and that the folder's tensors are put into the class here instead of by transformers.

    Args:
        weights: gives a layer's MLA weights.
        dtype: that the folder is written in: the reference is rounded to it, and both compute in float32.
        tolerance: the largest |Δ log p| allowed, nats.

    Raises:
        VerificationError: a tensor is missing, left over or of another shape, or the answers differ too much.
    """
    written, reference = _Written(folder), StreamedDecoder(source)
    length = input_ids.shape[1]
    positions = torch.arange(length)[None]
    mine = written.model.model.layer_arguments(torch.empty(1, length, 0), None, positions)
    theirs = reference.model.model.layer_arguments(torch.empty(1, length, 0), None, positions)
    (expected,) = reference.embed(input_ids)
    expected = expected.to(dtype).float() if source.spec.block.learned_positions == 0 else expected
    found = written.embed(input_ids, positions)
    release_freed_memory()
    for i in range(source.spec.num_layers):
        with reference.layer(i) as layer:
            layer.to(dtype).float()
            layer.self_attn = PaperAttention(weights(i).to(dtype), source.spec, i)
            expected = layer(expected, **theirs[i])
        found = written.layer(i)(found, **mine[i])
        written.drop(f"model.layers.{i}.")
        release_freed_memory()  # tensors of many sizes come and go, and each would find no place that is large enough
    with reference.head() as model:
        model.model.norm.to(dtype).float()
        model.lm_head.to(dtype).float()
        wanted = model.logits_of(model.model.norm(expected))
    release_freed_memory()
    answers = written.head(found)
    written.check_all_read()
    check = compare_logits(answers, wanted)
    check_tolerance(folder, check, tolerance)
    return check


class _Written:
    """The model of a folder on the meta device, whose parts are read when they are needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checkpoint: Checkpoint = open_safetensors(folder)
        config = cast("MLAConfig", MLAConfig.from_pretrained(folder))
        with torch.device("meta"):
            self.model: Any = MLAForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        self.model.model.rotary_emb = MLARotaryEmbedding(self.model.config)
        self.model.eval()
        self._left = set(self._checkpoint.names())

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        self._fill("model.embed")
        hidden = self.model.model.embed(self.model.model.embed_tokens(input_ids), positions)
        self.drop("model.embed")
        return hidden

    def layer(self, index: int) -> nn.Module:
        self._fill(f"model.layers.{index}.")
        return self.model.model.layers[index]

    def head(self, hidden: Tensor) -> Tensor:
        self._fill("model.norm.")
        if self.model.config.tie_word_embeddings:
            self._fill("model.embed_tokens.", again=True)
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
        else:
            self._fill("lm_head.")
        return self.model.logits_of(self.model.model.norm(hidden))

    def drop(self, prefix: str) -> None:
        """Take the memory of parameters back."""
        for name in self._parameters(prefix):
            path, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(path)
            setattr(module, leaf, nn.Parameter(getattr(module, leaf).to("meta"), requires_grad=False))

    def check_all_read(self) -> None:
        if self._left:
            raise VerificationError(
                f"{self._folder} holds tensors that its class has not: {sorted(self._left)[:3]}", _REMEDY
            )

    def _fill(self, prefix: str, *, again: bool = False) -> None:
        for name, parameter in self._parameters(prefix).items():
            if not again and name not in self._left:
                raise VerificationError(f"{self._folder} lacks {name}", _REMEDY)
            self._left.discard(name)
            value = self._checkpoint.read(name).float()
            if value.shape != parameter.shape:
                raise VerificationError(f"{name} of {self._folder} is {list(value.shape)}", _REMEDY)
            path, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))

    def _parameters(self, prefix: str) -> Mapping[str, nn.Parameter]:
        return {name: value for name, value in self.model.named_parameters() if name.startswith(prefix)}
