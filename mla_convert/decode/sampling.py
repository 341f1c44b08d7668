"""Choose the next tokens of several sequences, each by itself."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import UsageError

# Below it a float32 logit divided by the temperature overflows, long after the likeliest token has all the probability.
_SMALLEST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0, or what is next to it, takes the likeliest token.
        top_p: sample from the likeliest tokens that hold this share; None for all.
        seed: with a prompt's index, what its sample depends on.
    """

    temperature: float = 0.0
    top_p: float | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise UsageError for an option out of range."""
        if not 0 <= self.temperature < math.inf:
            raise UsageError(
                f"a temperature of {self.temperature} is no number from 0 on",
                "give 0 for greedy decoding, or more to sample",
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"a top-p of {self.top_p} is not in (0, 1]", "give a top-p above 0 and at most 1")
        if self.top_p is not None and self.temperature == 0:
            raise UsageError("top-p without a temperature changes nothing", "give a temperature above 0 as well")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < _SMALLEST_TEMPERATURE

    def prompt_seed(self, index: int) -> int:
        """Return the seed of the prompt at that place among the prompts, a hash of ``seed`` and the place."""
        digest = hashlib.sha256(f"{self.seed} {index}".encode()).digest()
        return int.from_bytes(digest[:4], "little")

    def generator(self, index: int, device: torch.device) -> torch.Generator:
        """Return the random numbers of the prompt at that place."""
        return torch.Generator(device).manual_seed(self.prompt_seed(index))

    def choose(self, logits: Tensor, generators: list[torch.Generator]) -> list[int]:
        """Return a token for each row of logits [B vocabulary], drawn from the row's own generator.

        The distribution is transformers': its own temperature and top-p warpers, applied in float32.
        """
        if self.greedy:
            return logits.argmax(dim=-1).tolist()
        from transformers.generation.logits_process import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopPLogitsWarper,
        )

        warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_p is not None and self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        # No warper here reads the tokens before.
        probabilities = warpers(logits.new_empty(0, dtype=torch.long), logits.float()).softmax(-1)
        drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(probabilities, generators, strict=True)]
        return torch.cat(drawn).tolist()
