"""``mla-convert generate``: continue a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mla_convert.cli._options import Dtype, JsonOption, QuietOption, RevisionOption, TokenOption, VerboseOption

Mode = Literal["auto", "absorbed", "expanded"]


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder that `mla-convert convert` wrote, or any source that it reads.",
            show_default=False,
        ),
    ],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to continue.", show_default=False)],
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
    dtype: Annotated[Dtype, typer.Option(help="Compute in this dtype.")] = "float32",
    revision: RevisionOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Continue a prompt.

    A converted model uses its latent cache, and the matrices of `mla-convert absorb` where they are there."""
    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as out:
        import torch

        from mla_convert.decode import generate as continue_prompt
        from mla_convert.evaluate import load_for_evaluation

        out.silence_loading()
        loaded, tokenizer = load_for_evaluation(model, getattr(torch, dtype), revision=revision, token=token)
        absorbed = _prepare(loaded, Path(model), mode)
        if not json:
            out.write(prompt)
        answer = continue_prompt(
            loaded,
            tokenizer,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            chat=chat,
            stream=None if json else out.write,
        )
        out.line()
        out.result(
            {
                "model": model,
                "prompt": prompt,
                "text": answer.text,
                "token_ids": list(answer.token_ids),
                "prompt_tokens": answer.prompt_tokens,
                "tokens_per_second": answer.tokens_per_second,
                "mode": mode,
                "absorbed_matrices": absorbed,
                "dtype": dtype,
            }
        )


def _prepare(model: Any, folder: Path, mode: Mode) -> bool:
    """Set how a converted model attends and attach its absorbed matrices; return whether there were any.

    Raises:
        UsageError: a mode is asked of a model that was not converted to the native format.
    """
    from mla_convert.decode import attach_absorbed
    from mla_convert.errors import UsageError

    if not hasattr(model, "set_attention_mode"):
        if mode == "auto":
            return False
        raise UsageError(
            f"--mode {mode} needs a model of the native format, and {folder} is none",
            "leave --mode out, or convert with --format native",
        )
    model.set_attention_mode(mode)
    return attach_absorbed(model, folder)
