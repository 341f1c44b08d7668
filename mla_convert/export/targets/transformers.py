"""The exported class for transformers: anything that a converted model has, exactly, and no engine besides."""

from __future__ import annotations

from pathlib import Path

import torch

from mla_convert.export.converted import ConvertedModel
from mla_convert.export.custom import write_custom
from mla_convert.export.obstacles import model_obstacles
from mla_convert.export.targets.sizes import (
    asked_sizes,
    dtype_reasons,
    padding_note,
    size_reasons,
    smallest_sizes,
    stored_dtype,
)
from mla_convert.export.targets.target import ExportOptions, ExportPlan
from mla_convert.progress import Progress


class TransformersTarget:
    """``DeepseekMLAForCausalLM``, shipped beside the weights."""

    name = "transformers"
    summary = "transformers' DeepSeek-V3 attention with this model's own RoPE slots, biases and windows (remote code)"

    def plan(self, model: ConvertedModel, options: ExportOptions) -> ExportPlan:
        """Return what :meth:`write` would do; the reasons of a refusal are all there are."""
        dtype, least = stored_dtype(model, options), smallest_sizes(model)
        sizes = asked_sizes(least, options)
        reasons = [*model_obstacles(model.config), *dtype_reasons(self.name, dtype), *size_reasons(least, sizes)]
        if options.form not in (None, "custom"):
            reasons.append(f"The transformers target has no form {options.form!r}; it writes the custom one.")
        if reasons:
            return ExportPlan(self.name, None, exact=False, dtype=dtype, reasons=tuple(reasons), engine="transformers")
        return ExportPlan(
            self.name,
            "custom",
            exact=True,
            dtype=dtype,
            kv_rank=sizes.kv_rank,
            rope_dim=sizes.rope_dim,
            cache_bytes=sizes.cache_bytes(model, dtype),
            notes=(
                "It is loaded with trust_remote_code=True, or without it after `import mla_convert.mla`.",
                *padding_note(model, sizes),
            ),
            engine="transformers",
        )

    def write(
        self, model: ConvertedModel, plan: ExportPlan, options: ExportOptions, folder: Path, progress: Progress
    ) -> None:
        """Write the folder; see :func:`~mla_convert.export.custom.write_custom`.

        Raises:
            OutputError: the folder cannot be written.
        """
        write_custom(
            model,
            plan.kv_rank,
            plan.rope_dim,
            folder,
            dtype=getattr(torch, plan.dtype),
            max_shard_size=options.max_shard_size,
            progress=progress,
        )


TRANSFORMERS = TransformersTarget()
