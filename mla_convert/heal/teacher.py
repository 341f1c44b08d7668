"""The teacher's answers to the windows of a text: computed, or kept on disk from the time before."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mla_convert.errors import HealError, OutputError
from mla_convert.heal.divergence import Targets, targets

Part = Literal["train", "held-out"]


@dataclass(frozen=True)
class Teacher:
    """A model that answers at one temperature, in evaluation mode and without gradients.

    Attributes:
        model: a transformers language model.
        temperature: of the targets.
        top_k: keep only so many tokens of each position, and the rest's sum; None keeps all.
        hidden: give hidden states too.
        bf16: compute in bfloat16.
        cache: the folder where answers are kept, one file a window; None keeps none. Needs `top_k`.
        key: what the answers depend on; kept ones with another key are made anew.
    """

    model: Any
    temperature: float = 1.0
    top_k: int | None = None
    hidden: bool = False
    bf16: bool = False
    cache: Path | None = None
    key: str = ""

    def answer(self, windows: Int[Tensor, "n S"], part: Part, rows: Sequence[int]) -> Targets:
        """Return the targets for ``windows[rows]`` on the model's device; ``part`` names the windows in the cache.

        Raises:
            OutputError: an answer cannot be kept.
        """
        device = self.model.device
        if self.cache is None:
            return self._compute(windows[list(rows)].to(device))
        paths = [self.cache / f"{part}-{row:08d}.safetensors" for row in rows]
        kept = [self._read(path) for path in paths]
        missing = [i for i, answer in enumerate(kept) if answer is None]
        if missing:
            made = self._compute(windows[[rows[i] for i in missing]].to(device))
            for place, i in enumerate(missing):
                kept[i] = {name: value[place : place + 1].cpu() for name, value in _tensors(made).items()}
                self._write(paths[i], kept[i] or {})
        whole = [answer for answer in kept if answer is not None]
        joined = {name: torch.cat([answer[name] for answer in whole]).to(device) for name in whole[0]}
        indices = joined.get("indices")
        indices = None if indices is None else indices.long()
        return Targets(joined.get("logits"), joined.get("log_p"), indices, joined.get("log_rest"))

    @torch.no_grad()
    def _compute(self, input_ids: Int[Tensor, "B S"]) -> Targets:
        with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=self.bf16):
            outputs = self.model(input_ids=input_ids, use_cache=False, output_hidden_states=self.hidden)
        made = targets(outputs.logits, temperature=self.temperature, top_k=self.top_k)
        if self.hidden:
            return replace(made, hidden=tuple(outputs.hidden_states[1:]))
        return made

    def _read(self, path: Path) -> dict[str, Tensor] | None:
        with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("key") == self.key:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return None

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: value.contiguous() for name, value in tensors.items()}, temporary, {"key": self.key})
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise OutputError(
                f"the teacher's answer {path} cannot be kept: {error}",
                "free some disk space, or distil without keeping the teacher's top tokens",
            ) from error


def check_teacher(student: Any, teacher: Any, *, hidden: bool = False) -> None:
    """Check that the teacher speaks of the student's tokens, and with ``hidden`` has states of the same shape.

    Raises:
        HealError: it does not.
    """
    ours, theirs = student.config.vocab_size, teacher.config.vocab_size
    if ours != theirs:
        raise HealError(
            f"the teacher's vocabulary has {theirs} tokens and the model's {ours}",
            "give the source that the model was converted from, or another model with the same tokenizer",
        )
    names = ("num_hidden_layers", "hidden_size")
    shapes = [tuple(getattr(model.config, name) for name in names) for model in (student, teacher)]
    if hidden and shapes[0] != shapes[1]:
        raise HealError(
            f"hidden states cannot be compared: the teacher has {shapes[1][0]} layers of width {shapes[1][1]}, the"
            f" model {shapes[0][0]} of {shapes[0][1]}",
            "give the source that the model was converted from, or do without what compares them: stage layers and"
            " hidden-state matching",
        )


def check_tokenizers(tokenizer: Any, teacher_tokenizer: Any) -> None:
    """Check that a token means the same to both models.

    Raises:
        HealError: it does not, and an example.
    """
    ours, theirs = tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        raise HealError(
            f"the teacher has another vocabulary: {len(differing)} tokens differ, among them {differing[0]!r}",
            "give the source that the model was converted from, or another model with the same tokenizer",
        )


def _tensors(answer: Targets) -> dict[str, Tensor]:
    named = {"logits": answer.logits, "log_p": answer.log_p, "log_rest": answer.log_rest}
    if answer.indices is not None:
        named["indices"] = answer.indices.to(torch.int32)
    return {name: value for name, value in named.items() if value is not None}
