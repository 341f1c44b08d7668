"""Building transformers' model from tensors that arrive one at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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
    head: str,
    generation_config: GenerationConfig,
    dtype: torch.dtype,
    attn_implementation: str,
    device: str,
) -> PreTrainedModel:
    """Return ``model_class`` in evaluation mode, holding ``tensors`` as its parameters in ``dtype`` on ``device``.

    The model is laid out on the meta device, so that no memory is spent on weights that are about to be replaced.

    Args:
        tensors: (parameter name, value) pairs, consumed one at a time; a tied output embedding is left out.
        head: the name among them of the output embedding, which classes call differently from one release to another.
        attn_implementation: ``sdpa`` becomes ``eager`` for a class that has no other.

    Raises:
        UnaccountedTensorError: a parameter or buffer is left without a value.
    """
    if attn_implementation == "sdpa" and not model_class._supports_sdpa:
        attn_implementation = "eager"
    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=attn_implementation)
    output: Any = model.get_output_embeddings()
    for name, value in tensors:
        parameter = nn.Parameter(value.to(device=device, dtype=dtype))
        del value  # else it would still be held while the next one is read
        if name == head:
            output.weight = parameter
        else:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, parameter)
    if config.tie_word_embeddings:
        output.weight = model.get_input_embeddings().weight
    _fill_buffers(model, device)
    left = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    if left:
        raise UnaccountedTensorError(
            f"{len(left)} parameters have no stored tensor: {', '.join(left[:6])}", "report this as a bug"
        )
    model.generation_config = generation_config
    return model.eval()


def _fill_buffers(model: PreTrainedModel, device: str) -> None:
    """Give the buffers that no checkpoint stores (frequencies, scales of embeddings) the values of their class.

    It is the class's own initialisation that knows them, for which parameters are marked as done with.

    Raises:
        UnaccountedTensorError: the class leaves one as it was.
    """
    for name, module in list(model.named_modules()):
        empty = [key for key, value in module.named_buffers(recurse=False) if value.is_meta]
        if not empty:
            continue
        for key in empty:
            value = torch.empty_like(getattr(module, key), device=device)
            setattr(module, key, value.fill_(torch.nan) if value.is_floating_point() else value)
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():
            model._init_weights(module)
        for key in empty:
            if bool(getattr(module, key).isnan().any()):
                raise UnaccountedTensorError(
                    f"{type(module).__name__} does not say what its buffer {name}.{key} holds", "report this as a bug"
                )
