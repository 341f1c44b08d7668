"""``mla-convert generate``: continue prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mla_convert.cli._options import Dtype, JsonOption, QuietOption, RevisionOption, TokenOption, VerboseOption
from mla_convert.errors import CacheFullError, UsageError

if TYPE_CHECKING:
    from mla_kernels import KernelError

Mode = Literal["auto", "absorbed", "expanded"]
Backend = Literal["auto", "triton", "torch"]
CacheDtype = Literal["auto", "fp8"]


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder that `mla-convert convert` wrote, or any source that it reads.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="What to continue; repeat it for several prompts.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A UTF-8 file of prompts, one a line; in a .jsonl file a JSON string, or an object with a prompt, a "
            "line.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Stop after this many tokens.")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0.0, help="Sample at this temperature; 0 takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Sample from the likeliest tokens that hold this share.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Seed of the sampling.")] = 0,
    mode: Annotated[
        Mode,
        typer.Option(help="How a converted model attends: auto is absorbed for decoding, expanded for the prompt."),
    ] = "auto",
    backend: Annotated[
        Backend,
        typer.Option(help="What decodes a converted model: auto is the Triton kernel where a GPU has it, else torch."),
    ] = "auto",
    cache_dtype: Annotated[
        CacheDtype,
        typer.Option(help="What a converted model's cache holds: auto is --dtype; fp8 is 8-bit latents with scales."),
    ] = "auto",
    batch_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="A converted model decodes up to this many prompts at once.")
    ] = 64,
    dtype: Annotated[Dtype, typer.Option(help="Compute in this dtype.")] = "float32",
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Compute there: cpu, cuda or cuda:N.")] = "cpu",
    revision: RevisionOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Continue prompts.

    A converted model uses its latent cache, and the matrices of `mla-convert absorb` where they are there. It decodes
    several prompts together, and stores and computes once what they begin with in common.

    Of several prompts, each is printed under a line `--- prompt 2 of 5 ---`, with its continuation right behind it and
    an empty line before the next. Programs should take --json, which keeps prompts and continuations apart."""
    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as out:
        import torch

        from mla_convert.decode import Sampling, check_prompts, generate_batch, read_prompts
        from mla_convert.evaluate import load_for_evaluation
        from mla_kernels import KernelError

        texts = [*(prompt or []), *(read_prompts(prompts) if prompts else [])]
        if not texts:
            raise UsageError("there is no prompt", "give --prompt TEXT, or --prompts FILE")
        check_prompts(texts)
        Sampling(temperature, top_p, seed).check()
        _check_device(device)
        out.silence_loading()
        loaded, tokenizer = load_for_evaluation(
            model, getattr(torch, dtype), revision=revision, token=token, device=device
        )
        absorbed = _prepare(loaded, Path(model), mode, backend, cache_dtype)
        alone = len(texts) == 1
        streamed = alone and not json
        try:
            answer = generate_batch(
                loaded,
                tokenizer,
                texts,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                chat=chat,
                batch_size=batch_size,
                cache_dtype=cache_dtype,
                stream=out.write if streamed else None,
                on_start=(lambda: out.write(texts[0])) if streamed else None,
            )
        except KernelError as error:
            raise _without_kernel(error, loaded.decode_backend.name, cache_dtype) from error
        except CacheFullError as error:
            less = "lower --max-new-tokens or --batch-size"
            more = less if cache_dtype == "fp8" else f"{less}, or give --cache-dtype fp8"
            raise CacheFullError(error.message, more) from error
        if not alone:
            out.write("\n\n".join(_headed(texts, [one.text for one in answer.generations])))
        out.line()
        results = [{"prompt": text, **asdict(one)} for text, one in zip(texts, answer.generations, strict=True)]
        out.result(
            {
                "model": model,
                **(results[0] if alone else {}),
                "results": results,
                "tokens_per_second": answer.tokens_per_second,
                "mode": mode,
                "absorbed_matrices": absorbed,
                "decode_backend": loaded.decode_backend._asdict() if hasattr(loaded, "decode_backend") else None,
                "cache": None if answer.cache is None else asdict(answer.cache),
                "dtype": dtype,
                "device": device,
            }
        )


def _headed(prompts: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Return each prompt with its continuation, under a line that counts it."""
    return [
        f"--- prompt {i} of {len(prompts)} ---\n{prompt}{text}"
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start=1)
    ]


def _without_kernel(error: KernelError, backend: str, cache_dtype: CacheDtype) -> UsageError:
    """Return the error of a kernel, or of a cache's rows, with the options that do without."""
    from mla_kernels import UnsupportedDeviceError

    options = ["give --backend torch"] if backend == "triton" else []
    if cache_dtype == "fp8" and not isinstance(error, UnsupportedDeviceError):
        options.append("leave --cache-dtype out")
    return UsageError(error.what, ", or ".join(options) or "give --mode expanded")


def _check_device(device: str) -> None:
    """Raise UsageError for a device that is none, or that is not there."""
    import torch

    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"--device {device} is no device", "give cpu, cuda or cuda:N") from error
    if place.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {device} is not supported", "give cpu, cuda or cuda:N")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device {device} is not there: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs",
            "leave --device out, or install a torch with CUDA",
        )


def _prepare(model: Any, folder: Path, mode: Mode, backend: Backend, cache_dtype: CacheDtype) -> bool:
    """Set how a converted model attends and attach its absorbed matrices; return whether there were any.

    Raises:
        UsageError: a mode, backend or cache dtype is asked of a model that was not converted to the native format.
    """
    from mla_convert.decode import attach_absorbed

    if not hasattr(model, "set_attention_mode"):
        for option, value in (("--mode", mode), ("--backend", backend), ("--cache-dtype", cache_dtype)):
            if value != "auto":
                raise UsageError(
                    f"{option} {value} needs a model of the native format, and {folder} is none",
                    f"leave {option} out, or convert with --format native",
                )
        return False
    model.set_attention_mode(mode)
    model.set_decode_backend(backend)
    return attach_absorbed(model, folder)
