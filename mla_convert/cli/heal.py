"""``mla-convert heal``: train a converted model against the model it came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mla_convert.cli._options import (
    ConvertedArgument,
    JsonOption,
    OverwriteOption,
    PrivateOption,
    PushOption,
    QuietOption,
    RevisionOption,
    TokenOption,
    VerboseOption,
)
from mla_convert.cli._pushing import check_push, claim_for, push_written, show_sent

if TYPE_CHECKING:
    from mla_convert.cli._console import Screen

Stage = Literal["layers", "global", "all"]


def heal(
    model: ConvertedArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    teacher: Annotated[
        str,
        typer.Option(metavar="SOURCE", help="The model that MODEL was converted from.", show_default=False),
    ],
    text: Annotated[
        list[str],
        typer.Option(
            metavar="TEXT",
            help="What to train on, as for `convert --calibration`; may be given several times.",
            show_default=False,
        ),
    ],
    stage: Annotated[
        Stage,
        typer.Option(
            help="layers: each layer's attention against the source's, one after the other. global: the whole model "
            "against the source's predictions. all: the one, then the other."
        ),
    ] = "layers",
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Training tokens, in equal shares of the texts.")] = (
        32768
    ),
    passes: Annotated[int, typer.Option(metavar="N", min=1, help="global: how often a context may be trained on.")] = 1,
    context: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens in a context.")] = 512,
    held_out: Annotated[
        float, typer.Option(metavar="SHARE", help="How much of each text is kept to check on, from its end.")
    ] = 0.05,
    layer_steps: Annotated[int, typer.Option(metavar="N", min=1, help="layers: optimiser steps a layer.")] = 200,
    layer_batch: Annotated[int, typer.Option(metavar="N", min=1, help="layers: contexts a step.")] = 4,
    layer_rate: Annotated[float, typer.Option(metavar="LR", help="layers: at the cosine's top.")] = 3e-3,
    layer_metric: Annotated[
        Literal["fisher", "identity"],
        typer.Option(help="layers: measure errors by the loss's gradients, or in all directions alike."),
    ] = "identity",
    optimizer: Annotated[
        Literal["muon", "adamw"], typer.Option(help="muon (AdamW for what is no matrix), or adamw for all.")
    ] = "muon",
    learning_rate: Annotated[float, typer.Option(metavar="LR", help="global: at the cosine's top.")] = 5e-4,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="global: contexts a process takes at once.")] = 1,
    accumulate: Annotated[int, typer.Option(metavar="N", min=1, help="global: such batches a step.")] = 1,
    parameters: Annotated[
        Literal["mla", "all"], typer.Option(help="global: train the attention blocks, or everything.")
    ] = "mla",
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="K", min=1, help="global: learn the source's K likeliest tokens, kept on disk.", show_default="all"
        ),
    ] = None,
    hidden_weight: Annotated[
        float, typer.Option(metavar="W", min=0.0, help="global: weight of the hidden states' distance.")
    ] = 0.0,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16; weights stay in float32.")] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="global: recompute activations, for less memory.")
    ] = False,
    evaluate_every: Annotated[
        int, typer.Option(metavar="N", min=1, help="global: steps between checks on held-out text, and checkpoints.")
    ] = 50,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Seed of the choice of contexts.")] = 0,
    push_to_hub: PushOption = None,
    private: PrivateOption = False,
    overwrite: OverwriteOption = False,
    revision: RevisionOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Train a converted model against its source.

    An interrupted run is gone on with by the same command, to the same result."""
    from mla_convert.cli._console import screen
    from mla_convert.errors import UsageError

    if not 0 < held_out < 1:
        raise UsageError(f"--held-out {held_out} is not a share between 0 and 1", "give for example --held-out 0.05")
    if not 0 < layer_rate < 1:
        raise UsageError(f"--layer-rate {layer_rate} is not between 0 and 1", "give for example --layer-rate 0.003")
    with screen(as_json=json, quiet=quiet, verbose=verbose) as console:
        check_push(push_to_hub, private)
        from mla_convert.heal.distil_settings import DistilSettings
        from mla_convert.heal.healing import HealRequest, TextSettings, check_heal, is_writer
        from mla_convert.heal.healing import heal as heal_model
        from mla_convert.heal.layers import LayerSettings

        console.if_interrupted(f"nothing was kept, and nothing is left of {out}", out)
        console.silence_loading()
        distil = DistilSettings(
            optimizer=optimizer,
            learning_rate=learning_rate,
            batch_size=batch_size,
            accumulate=accumulate,
            parameters=parameters,
            top_k=top_k,
            hidden_weight=hidden_weight,
            bf16=bf16,
            gradient_checkpointing=gradient_checkpointing,
            evaluate_every=evaluate_every,
            checkpoint_every=evaluate_every,
            seed=seed,
        )
        request = HealRequest(
            model=model,
            out=out,
            teacher=teacher,
            texts=tuple(text),
            stage=stage,
            text=TextSettings(tokens=tokens, context=context, held_out_share=held_out, seed=seed, passes=passes),
            layers=LayerSettings(
                steps=layer_steps,
                batch=layer_batch,
                optimizer=optimizer,
                learning_rate=layer_rate,
                metric=layer_metric,
                bf16=bf16,
                seed=seed,
            ),
            distil=distil,
            revision=revision,
            token=token,
            overwrite=overwrite,
        )
        check_heal(request)
        repository = claim_for(push_to_hub, private=private, token=token) if is_writer() else None
        with console.progress() as progress:
            result = heal_model(request, progress)
        layers: list[dict[str, Any]] = [vars(layer) for layer in result.layers]
        course = None
        if result.distil is not None:
            course = {
                "tokens": result.distil.tokens,
                "best_step": result.distil.best_step,
                "held_out_kl": {str(step): value for step, value in result.distil.held_out.items()},
            }
        answer: dict[str, Any] = {
            "model": str(model),
            "out": str(out),
            "layers": layers,
            "global": course,
            "timings": dict(result.timings),
        }
        if repository is not None:
            answer["pushed"] = push_written(console, out, repository, token)
        console.result(answer)
        if layers:
            _show_layers(console, layers)
        if result.distil is not None:
            _show_course(console, result.distil.held_out, result.distil.best_step, result.distil.tokens)
        console.line(f"wrote {out}; next:")
        console.line(f"  mla-convert evaluate {quote(str(out))} --against {quote(teacher)} --text FILE")
        if repository is not None:
            show_sent(console, answer["pushed"])


def _show_layers(console: Screen, layers: list[dict[str, Any]]) -> None:
    def mean(name: str) -> str:
        return f"{sum(layer[name] for layer in layers) / len(layers):.4f}"

    kept = sum(layer["kept"] for layer in layers)
    console.facts(
        "error of the attention's output on held-out text, as a share of its energy, mean over the layers",
        [
            ("before", mean("held_out_before")),
            ("after", mean("held_out_after")),
            ("layers", f"{kept} of {len(layers)} got better; the others keep the weights they had"),
        ],
    )


def _show_course(console: Screen, held_out: Mapping[int, float], best_step: int, tokens: int) -> None:
    console.facts(
        "KL to the source on held-out text, nats a token",
        [
            ("before", f"{held_out[0]:.4f}"),
            ("best", f"{held_out[best_step]:.4f}, after step {best_step}"),
            ("tokens", f"{tokens:,}"),
        ],
    )
