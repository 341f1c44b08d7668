"""A folder for vLLM: its own DeepSeek class where that is exact, else the exported class with its code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from mla_convert.errors import FormatError
from mla_convert.export.converted import ConvertedModel
from mla_convert.export.custom import write_custom
from mla_convert.export.obstacles import model_obstacles
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
from mla_convert.spec import DTYPE_BYTES

# Read in vLLM 0.32: the C + R that its latent attention takes on GPUs, and the one that runs on CPUs. Of the first, 256
# and 512 with 64 RoPE dims are the shapes that its kernels are written for.
_WIDTHS = (320, 512, 576)
_CPU_WIDTH = 576
_SERVED = (Sizes(256, 64), Sizes(512, 64))


@dataclass(frozen=True)
class _Candidate:
    """A form, the sizes that it would have, and what speaks against it."""

    sizes: Sizes
    reasons: tuple[str, ...]

    @property
    def served(self) -> bool:
        """Whether vLLM caches latents of this size."""
        return self.sizes.cached in _WIDTHS


class VLLMTarget:
    """``DeepseekV3ForCausalLM`` for vLLM's own class, or ``DeepseekMLAForCausalLM`` with its code."""

    name = "vllm"
    summary = (
        "vLLM's own DeepSeek class where it is exact, else the class of --target transformers on its MLA attention"
    )

    def plan(self, model: ConvertedModel, options: ExportOptions) -> ExportPlan:
        """Return what :meth:`write` would do; the reasons of a refusal are all there are."""
        dtype = stored_dtype(model, options)
        stock, custom = _stock(model, options, dtype), _custom(model, options, dtype)
        against = stock.reasons
        if options.form is None and not against and custom.served and not stock.served:
            needed = f"At one RoPE base the slots need R = {stock.sizes.rope_dim}"
            against = (f"{needed}, and vLLM does not cache {stock.sizes.cached} numbers a token a layer.",)
        if options.form not in (None, "stock", "custom"):
            return self._refusal(dtype, (f"The vllm target has no form {options.form!r}.",))
        if options.form == "stock" and against:
            return self._refusal(dtype, against)
        if options.form == "stock" or (options.form is None and not against):
            notes = ("vLLM's own DeepSeek class loads it.", *stock_notes(model, dtype))
            return self._planned(model, dtype, "stock", stock.sizes, (), notes)
        if custom.reasons:
            return self._refusal(dtype, custom.reasons)
        notes = ("vLLM loads it with --trust-remote-code, and computes it on its own MLA attention.",)
        return self._planned(model, dtype, "custom", custom.sizes, against, notes)

    def write(
        self, model: ConvertedModel, plan: ExportPlan, options: ExportOptions, folder: Path, progress: Progress
    ) -> None:
        """Write the form that was planned.

        Raises:
            OutputError: the folder cannot be written.
        """
        if plan.form == "stock":
            # vLLM on CPUs turns the queries of several heads wrongly by default RoPE, and rightly by YaRN's code.
            write_stock(model, plan, options, folder, progress, rope_type="yarn")
            return
        write_custom(
            model,
            plan.kv_rank,
            plan.rope_dim,
            folder,
            dtype=getattr(torch, plan.dtype),
            served=True,
            max_shard_size=options.max_shard_size,
            progress=progress,
        )

    def _refusal(self, dtype: str, reasons: tuple[str, ...]) -> ExportPlan:
        return ExportPlan(self.name, None, exact=False, dtype=dtype, reasons=reasons, engine="vllm")

    def _planned(
        self,
        model: ConvertedModel,
        dtype: str,
        form: Literal["stock", "custom"],
        sizes: Sizes,
        reasons: tuple[str, ...],
        notes: tuple[str, ...],
    ) -> ExportPlan:
        return ExportPlan(
            self.name,
            form,
            exact=True,
            dtype=dtype,
            kv_rank=sizes.kv_rank,
            rope_dim=sizes.rope_dim,
            cache_bytes=sizes.cache_bytes(model, dtype),
            reasons=reasons,
            notes=(*notes, *padding_note(model, sizes), *_shape_notes(model, sizes, dtype), *window_note(model)),
            engine="vllm",
        )


VLLM = VLLMTarget()


def _stock(model: ConvertedModel, options: ExportOptions, dtype: str) -> _Candidate:
    reasons = [*stock_reasons(model, dtype)]
    least = smallest_sizes(model)
    try:
        least = Sizes(least.kv_rank, fit_progression(model.frequencies).dim)
    except FormatError as error:
        reasons.append(f"{error.message[0].upper()}{error.message[1:]}.")
    return _candidate(least, options, dtype, reasons)


def _custom(model: ConvertedModel, options: ExportOptions, dtype: str) -> _Candidate:
    return _candidate(smallest_sizes(model), options, dtype, [*model_obstacles(model.config)])


def _candidate(least: Sizes, options: ExportOptions, dtype: str, reasons: list[str]) -> _Candidate:
    """With the sizes asked for, or the smallest that vLLM is made for, or where there are none the least."""
    asked = asked_sizes(least, options)
    if options.kv_rank is None and options.rope_dim is None:
        fits = (s for s in _SERVED if least.kv_rank <= s.kv_rank and least.rope_dim <= s.rope_dim)
        asked = next(fits, least)
    return _Candidate(asked, (*dtype_reasons("vllm", dtype), *size_reasons(least, asked), *reasons))


def _shape_notes(model: ConvertedModel, sizes: Sizes, dtype: str) -> Iterator[str]:
    width = sizes.cached
    if width not in _WIDTHS:
        expanded = 2 * model.spec.num_heads * (model.config.qk_nope_head_dim + sizes.rope_dim)
        expanded *= model.spec.num_layers * DTYPE_BYTES[dtype]
        yield (
            f"vLLM refuses to cache latents of {width} numbers a token a layer (it takes {_listed()}): pad them by "
            f"--kv-rank and --rope-dim, or set VLLM_MLA_DISABLE=1, with which it caches keys and values of every head, "
            f"{expanded} bytes a token."
        )
    elif width != _CPU_WIDTH:
        yield (
            f"C + R = {width} is served on GPUs; on CPUs vLLM takes {_CPU_WIDTH} only (--kv-rank 512 --rope-dim 64), "
            "or VLLM_MLA_DISABLE=1, with which it caches keys and values of every head."
        )
    if dtype == "float32":
        yield "On GPUs vLLM's latent attention takes 16-bit numbers: serve it with --dtype bfloat16."


def _listed() -> str:
    return ", ".join(map(str, _WIDTHS[:-1])) + f" or {_WIDTHS[-1]}"
