"""How to distil."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mla_convert.errors import UsageError


@dataclass(frozen=True)
class DistilSettings:
    """How to distil.

    Attributes:
        optimizer: ``muon`` for matrices, with AdamW for what is none, or ``adamw``.
        learning_rate: at the top of a cosine that falls to zero.
        warmup: the share of steps in which it rises linearly.
        weight_decay: of both, decoupled from the gradient.
        clip: the largest norm of a step's gradient.
        batch_size: windows that one process takes through the model at once.
        accumulate: how many such batches make one step.
        temperature: of both distributions.
        hidden_weight: weight of `hidden_distance` beside the KL; 0 leaves it out.
        parameters: ``mla``: those of the attention blocks; ``all``: every parameter.
        top_k: distil from the teacher's so many likeliest tokens, which are kept on disk; None distils from all.
        bf16: compute in bfloat16; weights and optimiser stay in float32.
        gradient_checkpointing: recompute activations in the backward pass, for less memory.
        evaluate_every, checkpoint_every: in steps.
        patience: stop after so many evaluations without a better one; None never does.
        seed: of the model's dropout, where it has any.
    """

    optimizer: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 5e-4
    warmup: float = 0.05
    weight_decay: float = 0.0
    clip: float = 1.0
    batch_size: int = 1
    accumulate: int = 1
    temperature: float = 1.0
    hidden_weight: float = 0.0
    parameters: Literal["mla", "all"] = "mla"
    top_k: int | None = None
    bf16: bool = False
    gradient_checkpointing: bool = False
    evaluate_every: int = 50
    checkpoint_every: int = 50
    patience: int | None = 3
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            UsageError: one is out of range, or two contradict each other.
        """
        for name in ("learning_rate", "clip", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}", "give a positive number")
        for name in ("batch_size", "accumulate", "evaluate_every", "checkpoint_every", "top_k", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}", "give at least 1")
        if not 0 <= self.warmup < 1 or self.weight_decay < 0 or self.hidden_weight < 0:
            raise UsageError("warmup, weight_decay or hidden_weight is out of range", "give 0 or a small number")
        if self.optimizer not in ("muon", "adamw"):
            raise UsageError(f"there is no optimizer {self.optimizer!r}", "one of muon, adamw")
        if self.parameters not in ("mla", "all"):
            raise UsageError(f"there are no parameters {self.parameters!r} to train", "one of mla, all")
        if self.top_k is not None and self.hidden_weight > 0:
            raise UsageError("hidden states are not kept with the teacher's top tokens", "choose one of the two")
