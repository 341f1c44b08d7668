"""A student near its teacher, and random windows to heal on; fast enough to train in a second."""

from __future__ import annotations

import torch

from mla_convert.heal.data import HealingText
from mla_convert.mla import MLAForCausalLM
from tests.mla.native import VOCAB, native

TEACHER_SEED, STUDENT_SEED = 0, 1
WINDOWS, HELD_OUT, CONTEXT = 8, 3, 16


def student_and_teacher(variant: str = "plain") -> tuple[MLAForCausalLM, MLAForCausalLM]:
    """Two models that differ in their attention alone, in every weight of it, so that training it can undo all."""
    teacher, student = native(variant, seed=TEACHER_SEED), native(variant, seed=TEACHER_SEED)
    other = native(variant, seed=STUDENT_SEED)
    with torch.no_grad():
        for (name, weight), theirs in zip(student.named_parameters(), other.parameters(), strict=True):
            if ".self_attn." in name:
                weight.lerp_(theirs, 0.3)
    return student, teacher


def healing_text_of(passes: int = 6) -> HealingText:
    """Random windows, each trained on that many times."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, VOCAB, (WINDOWS + HELD_OUT, CONTEXT), generator=generator)
    order = torch.cat([torch.randperm(WINDOWS, generator=generator) for _ in range(passes)])
    return HealingText(rows[:WINDOWS], rows[WINDOWS:], order, ("random",), ("0" * 64,))
