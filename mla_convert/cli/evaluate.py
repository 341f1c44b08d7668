"""``mla-convert evaluate``: perplexity and cache of a model, alone or beside the model that it came from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mla_convert.cli._options import Dtype, JsonOption, QuietOption, RevisionOption, TokenOption, VerboseOption

if TYPE_CHECKING:
    from mla_convert.cli._console import Screen


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder that `mla-convert convert` wrote, or any source that it reads.",
            show_default=False,
        ),
    ],
    text: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="A UTF-8 file, builtin:pydoc, or a dataset as ID[:CONFIG][@SPLIT][#COLUMN]. This or --tasks.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Measure this model too, and how far the two agree.", show_default=False),
    ] = None,
    context: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens in a context.")] = 512,
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Use this many tokens from the text's start.", show_default="all"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Slide the context by this many tokens instead of cutting disjoint ones.",
            show_default="disjoint contexts",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Contexts that go through together.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Compute, and hold the cache, in this dtype.")] = "float32",
    record: Annotated[
        bool,
        typer.Option(
            "--record", help="With --against: write the result into MODEL's conversion.json, model card and report."
        ),
    ] = False,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK",
            help="Tasks of the lm-evaluation-harness (the extra `tasks`) instead of a text; repeatable, or by commas.",
            show_default=False,
        ),
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --tasks: a folder of task files of your own.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --tasks: the first N documents of each, to try it out.", show_default="all"
        ),
    ] = None,
    fewshot: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="With --tasks: examples before each question.", show_default="each task's own"
        ),
    ] = None,
    revision: RevisionOption = None,
    token: TokenOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Measure perplexity and cache bytes a token, or the figures of benchmark tasks.

    With --against also the KL divergence and the top-1 agreement between the two, on the same tokens;
    --revision and --token then go to both.
    """
    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as out:
        out.if_interrupted("a measurement keeps nothing" + (", and none was recorded" if record else ""))
        check_record(record, against, model)
        _check_kind(text, tasks, record=record, include_path=include_path, limit=limit, fewshot=fewshot)
        if text is None:
            from mla_convert.cli._tasks import run_tasks

            run_tasks(
                out,
                model,
                against,
                dtype,
                tasks=tasks or [],
                include_path=include_path,
                limit=limit,
                num_fewshot=fewshot,
                batch_size=batch_size,
                revision=revision,
                token=token,
            )
            return

        import torch

        from mla_convert.calibrate.text import read_text, windows
        from mla_convert.evaluate import cache_bytes_per_token, compare, load_for_evaluation, perplexity
        from mla_convert.record import add_measurement
        from mla_convert.report import write_report

        out.silence_loading()
        number_type = getattr(torch, dtype)
        corpus = read_text(text)
        loaded, tokenizer = load_for_evaluation(model, number_type, revision=revision, token=token)
        contexts = windows(tokenizer, corpus.text, context=context, max_tokens=max_tokens, seed=None)
        result: dict[str, Any] = {
            "model": model,
            "text": {"source": corpus.ref, "sha256": corpus.digest},
            "context": context,
            "contexts": len(contexts),
            "stride": stride,
            "dtype": dtype,
            "cache_bytes_per_token": _whole(cache_bytes_per_token(loaded)),
        }
        with out.progress() as progress:
            if against is None:
                scores = perplexity(loaded, contexts, batch_size=batch_size, progress=progress, stride=stride)
                result |= {"perplexity": scores.perplexity, "tokens": scores.tokens}
            else:
                reference, _ = load_for_evaluation(against, number_type, revision=revision, token=token)
                both = compare(loaded, reference, contexts, batch_size=batch_size, progress=progress, stride=stride)
                result |= {
                    "perplexity": both.model.perplexity,
                    "tokens": both.tokens,
                    "against": {
                        "source": against,
                        "perplexity": both.reference.perplexity,
                        "cache_bytes_per_token": _whole(cache_bytes_per_token(reference)),
                    },
                    "log_ratio": both.log_ratio,
                    "kl": both.kl,
                    "top1_agreement": both.top1_agreement,
                }
        if record:
            add_measurement(Path(model), _row(result))
            write_report(Path(model))
        out.result(result)
        _show(out, result)


def check_record(record: bool, against: str | None, model: str) -> None:
    """Check before any long work that a measurement can be recorded where it is asked for.

    Raises:
        UsageError: there is nothing to compare with, or the model is not a folder that convert wrote.
    """
    from mla_convert.errors import UsageError

    if record and against is None:
        raise UsageError("--record writes down a comparison", "add --against SOURCE")
    if record and not (Path(model) / "conversion.json").is_file():
        raise UsageError(
            f"{model} has no conversion.json to record in", "leave --record out, or name a converted folder"
        )


def _check_kind(text: str | None, tasks: list[str] | None, *, record: bool, **task_options: object) -> None:
    """Check that one of a text and tasks is asked for.

    Raises:
        UsageError: both are, or neither, or an option of one without it.
    """
    from mla_convert.errors import UsageError

    if (text is None) == (not tasks):
        raise UsageError("evaluate needs one of --text or --tasks", "mla-convert evaluate --help")
    if text is None and record:
        raise UsageError("--record writes down a perplexity", "leave it out with --tasks")
    if text is not None and any(option is not None for option in task_options.values()):
        raise UsageError(
            "--include-path, --limit and --fewshot are for --tasks", "leave them out; --max-tokens limits a text"
        )


def _row(result: dict[str, Any]) -> dict[str, Any]:
    """The measurement as conversion.json keeps it."""
    return {
        "text": result["text"]["source"],
        "text_sha256": result["text"]["sha256"],
        "context": result["context"],
        "tokens": result["tokens"],
        "dtype": result["dtype"],
        "source_perplexity": result["against"]["perplexity"],
        "perplexity": result["perplexity"],
        "log_ratio": result["log_ratio"],
        "kl": result["kl"],
        "top1_agreement": result["top1_agreement"],
    }


def _whole(count: float) -> int | float:
    """Return a count as an int where it is whole."""
    return int(count) if float(count).is_integer() else count


def _show(out: Screen, result: dict[str, Any]) -> None:
    title = f"{result['tokens']:,} tokens of {result['text']['source']}, contexts of {result['context']}"
    against = result.get("against")
    if against is None:
        rows = [("perplexity", f"{result['perplexity']:.3f}"), ("cache bytes a token", _bytes(result))]
        out.table(title, ("", result["model"]), rows)
        return
    ratio = result["cache_bytes_per_token"] / against["cache_bytes_per_token"]
    rows = [
        (
            "perplexity",
            f"{against['perplexity']:.3f}",
            f"{result['perplexity']:.3f}",
            f"ln ratio {result['log_ratio']:+.4f}",
        ),
        ("cache bytes a token", _bytes(against), _bytes(result), f"{ratio - 1:+.1%}"),
        ("KL divergence, nats a token", "", f"{result['kl']:.4f}", ""),
        ("top-1 agreement", "", f"{result['top1_agreement']:.1%}", ""),
    ]
    out.table(title, ("", f"before: {against['source']}", f"after: {result['model']}", "change"), rows)


def _bytes(result: dict[str, Any]) -> str:
    count = result["cache_bytes_per_token"]
    return f"{count:,}" if isinstance(count, int) or math.isnan(count) else f"{count:,.1f}"
