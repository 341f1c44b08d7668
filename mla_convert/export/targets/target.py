"""What a target of ``mla-convert export`` is: a form in which an engine loads a converted model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from mla_convert.export.converted import ConvertedModel
from mla_convert.progress import Progress

Form = Literal["stock", "custom", "gguf"]
StoredAs = Literal["float32", "bfloat16", "float16", "q8_0"]
Engine = Literal["transformers", "vllm", "llamacpp"]


@dataclass(frozen=True)
class ExportOptions:
    """What the user may choose.

    Attributes:
        dtype: what the weights are stored as; None keeps what they are.
        max_shard_size: of safetensors files, as :func:`~mla_convert.export.shards.parse_size` reads it.
        kv_rank: pad every layer's latent to this many numbers; None as little as the target allows.
        rope_dim: pad every layer's RoPE key likewise.
        form: write this form, or refuse; None the best that is exact.
    """

    dtype: StoredAs | None = None
    max_shard_size: int | str = "5GB"
    kv_rank: int | None = None
    rope_dim: int | None = None
    form: Form | None = None


@dataclass(frozen=True)
class ExportPlan:
    """What a target would write, known from config.json alone.

    Attributes:
        target: its name.
        form: ``stock`` (an architecture that the engine has itself), ``custom`` (this project's class) or ``gguf``;
            None where the target refuses the model.
        exact: whether it answers as the converted model does, up to rounding.
        dtype: what the weights would be stored as.
        kv_rank, rope_dim: C and R of every layer as written.
        cache_bytes: a token, over all layers, what the engine will really keep for one in its default cache dtype; None
            where that is not known.
        reasons: why it is refused, or why not the stock form, a sentence each.
        notes: what the user should know about the form that is written.
        engine: what can verify it.
    """

    target: str
    form: Form | None
    exact: bool
    dtype: str
    kv_rank: int = 0
    rope_dim: int = 0
    cache_bytes: int | None = None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    engine: Engine | None = None


class Target(Protocol):
    """One way to write a converted model."""

    name: str
    summary: str

    def plan(self, model: ConvertedModel, options: ExportOptions) -> ExportPlan:
        """Return what :meth:`write` would do, without reading weights; a refusal is a plan whose form is None."""
        ...

    def write(
        self, model: ConvertedModel, plan: ExportPlan, options: ExportOptions, folder: Path, progress: Progress
    ) -> None:
        """Write into the existing, empty ``folder``; at most one layer is in memory.

        Raises:
            OutputError: the folder cannot be written.
        """
        ...
