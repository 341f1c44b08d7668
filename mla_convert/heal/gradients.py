"""How much an error in each layer's attention output matters to the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mla_convert.calibrate.collect import run_context
from mla_convert.progress import Progress, silent


def output_metrics(
    teacher: Any, contexts: Int[Tensor, "n S"], *, seed: int, progress: Progress | None = None
) -> list[Float[Tensor, "D D"]]:
    """Return E[g gᵀ] for each layer, g the loss's gradient at what attention adds, times the hidden state's norm.

    The loss is the cross-entropy on labels drawn from the teacher's own predictions, so that the moment is the Fisher
    information (Kunstner et al., 2019, arXiv:1905.12558). A gradient shrinks as the hidden state that the output is
    added to grows, since the state is normalised before it is read: the norm takes that out, as `heal.layers` counts a
    token's error as a share of its state's energy. Each moment has a mean diagonal of 1.

    Args:
        teacher: the source's model, in evaluation mode; it is run forward and backward as a whole, one context at once.
    """
    report = progress or silent
    layers = teacher.get_decoder().layers
    size = teacher.config.hidden_size
    sums = [torch.zeros(size, size) for _ in layers]
    states: list[Tensor] = [torch.empty(0)] * len(layers)
    outputs: list[Tensor] = [torch.empty(0)] * len(layers)

    def keep_state(i: int) -> Callable[..., None]:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[i] = (args[0] if args else kwargs["hidden_states"]).detach()

        return hook

    def keep_output(i: int) -> Callable[..., None]:
        def hook(_module: Any, _args: tuple[Any, ...], result: Any) -> None:
            outputs[i] = result[0] if isinstance(result, tuple) else result
            outputs[i].retain_grad()

        return hook

    handles = [layer.register_forward_pre_hook(keep_state(i), with_kwargs=True) for i, layer in enumerate(layers)]
    handles += [_last_of_attention(layer).register_forward_hook(keep_output(i)) for i, layer in enumerate(layers)]
    required = {name: parameter.requires_grad for name, parameter in teacher.named_parameters()}
    try:
        teacher.requires_grad_(False)
        for row in range(len(contexts)):
            generator = torch.Generator().manual_seed((seed * 1_000_003 + row) % 2**63)
            run_context(teacher, contexts[row : row + 1], True, generator)
            for i, output in enumerate(outputs):
                added = getattr(layers[i], "residual_scale", 1.0) * output.detach()
                norm = (states[i] + added).norm(dim=-1, keepdim=True)
                assert output.grad is not None  # it was retained
                gradient = (output.grad * norm).flatten(0, 1).float()
                sums[i] += (gradient.mT @ gradient).cpu()
            report("metrics", row + 1, len(contexts))
    finally:
        for handle in handles:
            handle.remove()
        for name, parameter in teacher.named_parameters():
            parameter.requires_grad_(required[name])
    return [total / total.diagonal().mean().clamp_min(torch.finfo(total.dtype).tiny) for total in sums]


def _last_of_attention(layer: Any) -> Any:
    """The module that gives what is added to the hidden state: the attention, or a norm on its output."""
    norm = getattr(layer, "attention_output_layernorm", None)
    return layer.self_attn if norm is None else norm
