"""Building transformers' model from tensors that arrive one at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mla_convert.errors import UnaccountedTensorError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel


def build_model(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    generation_config: GenerationConfig,
    dtype: torch.dtype,
    attn_implementation: str,
    device: str,
) -> PreTrainedModel:
    """Return ``model_class`` in evaluation mode, holding ``tensors`` as its parameters in ``dtype`` on ``device``.

    The model is laid out on the meta device, so that no memory is spent on weights that are about to be replaced.

    Args:
        tensors: (parameter name, value) pairs, consumed one at a time; a tied output embedding is left out.

    Raises:
        UnaccountedTensorError: a parameter is left without a value.
    """
    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=attn_implementation)
    for name, value in tensors:
        _assign(model, name, value.to(device=device, dtype=dtype))
        del value  # else it would still be held while the next one is read
    if config.tie_word_embeddings:
        model.get_submodule("lm_head").weight = model.get_input_embeddings().weight
    # Frequencies are a buffer that no checkpoint stores: made anew, off the meta device and always in float32.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    left = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    if left:
        raise UnaccountedTensorError(
            f"{len(left)} parameters have no stored tensor: {', '.join(left[:6])}", "report this as a bug"
        )
    model.generation_config = generation_config
    return model.eval()


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    """Put ``value`` in place of the parameter ``name``."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, nn.Parameter(value))
