"""Weights and optimiser state as plain tensors by name, whatever accelerate has made of the model, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def read_weights(model: Any, names: Collection[str]) -> dict[str, Tensor]:
    """Return copies of the named parameters on the CPU, whole even where they are sharded; empty but on rank 0."""
    found: dict[str, Any] = get_model_state_dict(model, options=_options())
    return {name: value.detach().cpu().clone() for name, value in found.items() if name in names}


def write_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Put rank 0's ``weights`` into the model on every rank; other parameters stay."""
    set_model_state_dict(model, dict(weights), options=_options(loading=True))


def read_optimizers(model: Any, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return copies of the optimisers' state on the CPU, as ``parameter:quantity``; empty but on rank 0."""
    found: dict[str, Any] = get_optimizer_state_dict(model, optimizers, options=_options())
    return {
        f"{name}:{quantity}": value.detach().cpu().clone()
        for name, quantities in found.get("state", {}).items()
        for quantity, value in quantities.items()
    }


def write_optimizers(model: Any, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Tensor]) -> None:
    """Put rank 0's ``state`` into the optimisers on every rank; their settings, learning rates included, stay."""
    # An optimiser that has made no step is given a state of zeros here, by a step of rate 0.
    wanted: dict[str, Any] = get_optimizer_state_dict(model, optimizers, options=_options())
    for key, value in state.items():
        name, _, quantity = key.rpartition(":")
        wanted["state"][name][quantity] = value
    set_optimizer_state_dict(model, optimizers, optim_state_dict=wanted, options=_options(loading=True))


def _options(*, loading: bool = False) -> StateDictOptions:
    spread = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return StateDictOptions(
        full_state_dict=True,
        cpu_offload=True,
        ignore_frozen_params=True,
        strict=False,
        broadcast_from_rank0=loading and spread,
    )
