"""The stock class for SGLang, where it is exact. SGLang has been read and not run: transformers verifies the folder."""

from __future__ import annotations

import json
from pathlib import Path

from mla_convert.errors import FormatError
from mla_convert.export.converted import ConvertedModel
from mla_convert.export.progression import fit_progression
from mla_convert.export.targets.sizes import (
    Sizes,
    asked_sizes,
    dtype_reasons,
    padding_note,
    size_reasons,
    smallest_sizes,
    stored_dtype,
)
from mla_convert.export.targets.stock import stock_notes, stock_reasons, window_note, write_stock
from mla_convert.export.targets.target import ExportOptions, ExportPlan
from mla_convert.progress import Progress

_UNRUN = (
    "transformers' DeepSeek class verifies the folder. That SGLang computes the same and caches C + R numbers a token "
    "a layer was read in its source and not run, and it is not known which sizes its kernels take (DeepSeek's own are "
    "--kv-rank 512 --rope-dim 64)."
)


class SGLangTarget:
    """``DeepseekV3ForCausalLM`` with plain RoPE, for SGLang's own DeepSeek class."""

    name = "sglang"
    summary = "SGLang's own DeepSeek class, where it is exact"

    def plan(self, model: ConvertedModel, options: ExportOptions) -> ExportPlan:
        """Return what :meth:`write` would do; the reasons of a refusal are all there are."""
        dtype, least = stored_dtype(model, options), smallest_sizes(model)
        reasons = [*dtype_reasons(self.name, dtype), *stock_reasons(model, dtype)]
        try:
            least = Sizes(least.kv_rank, fit_progression(model.frequencies).dim)
        except FormatError as error:
            reasons.append(f"{error.message[0].upper()}{error.message[1:]}.")
        sizes = asked_sizes(least, options)
        reasons += size_reasons(least, sizes)
        if options.form not in (None, "stock"):
            reasons.append(f"The sglang target has no form {options.form!r}: SGLang computes latents in its own class.")
        if reasons:
            return ExportPlan(self.name, None, exact=False, dtype=dtype, reasons=tuple(reasons), engine="transformers")
        return ExportPlan(
            self.name,
            "stock",
            exact=True,
            dtype=dtype,
            kv_rank=sizes.kv_rank,
            rope_dim=sizes.rope_dim,
            cache_bytes=sizes.cache_bytes(model, dtype),
            notes=(
                _UNRUN,
                *padding_note(model, sizes),
                *stock_notes(model, dtype),
                *window_note(model),
            ),
            engine="transformers",
        )

    def write(
        self, model: ConvertedModel, plan: ExportPlan, options: ExportOptions, folder: Path, progress: Progress
    ) -> None:
        """Write the folder.

        Raises:
            OutputError: the folder cannot be written.
        """
        write_stock(model, plan, options, folder, progress, rope_type="default")
        path = folder / "config.json"
        fields = json.loads(path.read_text(encoding="utf-8"))
        # Where SGLang takes the base from here and finds none, it assumes 10000 without a word.
        fields["rope_theta"] = fields["rope_parameters"]["rope_theta"]
        path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


SGLANG = SGLangTarget()
