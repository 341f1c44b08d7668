"""Written by `python docs/generate_api.py`: what type checkers and editors see of the commands as functions."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal

from mla_convert.progress import Progress
from mla_convert.sources import open_source as open_source

__version__: str

def absorb(
    model: str | PathLike[str],
    *,
    merge: Literal["auto", "never", "always"] = "auto",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Precompute what a converted model decodes with.

    Writes absorbed.safetensors beside the weights: W_UK and W_UV of each head, laid out for decoding.

    Args:
        model: A folder that `mla-convert convert` wrote.
        merge: Merge W_UV and W_O: auto merges where that is fewer bytes.
        progress: Called as progress(stage, done, total) while it works.

    Returns:
        The object that --json prints.

    Raises:
        MLAConvertError: with what is wrong, and what to do about it.
    """

def compare(
    models: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    html: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Put conversions beside each other: what each caches, and what `evaluate --record` measured of it.

    Args:
        models: Folders that convert or heal wrote.
        html: Write a page with a plot of quality against cache besides.
        progress: Called as progress(stage, done, total) while it works.

    Returns:
        The object that --json prints.

    Raises:
        MLAConvertError: with what is wrong, and what to do about it.
    """

def convert(
    source: str | PathLike[str],
    out: str | PathLike[str],
    *,
    recipe: str = "default",
    set: str | Sequence[str] | None = None,
    cache: float | None = None,
    kv_rank: int | None = None,
    rope_dim: int | None = None,
    format: Literal["native", "deepseek"] = "native",
    stock_rope: Literal["default", "longrope"] = "default",
    calibration: str | Sequence[str] | None = None,
    calibration_tokens: int | None = None,
    statistics: str | PathLike[str] | None = None,
    save_statistics: str | PathLike[str] | None = None,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_shard_size: str = "5GB",
    low_memory: bool | None = None,
    device: str | Sequence[str] | None = None,
    bf16: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a source as a model with latent attention.

    The conversion calibrates on text; the recipes balanced and best train on it besides. The cache is sized
    with --cache, or with --kv-rank and --rope-dim.

    Args:
        source: A model ID on the Hugging Face hub, a folder with config.json and safetensors files, a
            .gguf file, or builtin:smollm2-135m.
        out: The folder to write; it appears whole or not at all.
        recipe: default, fast, balanced, best, another recipe's name, or a YAML file.
        set: Replace a value of the recipe, such as factorise.damping=0.2; may be given several times.
            `mla-convert recipes show NAME` says what there is.
        cache: Share of the source's cache to keep: above 0, at most 1.
        kv_rank: Width of the latent; instead of --cache, with --rope-dim.
        rope_dim: Width of the shared RoPE key, even; with --kv-rank.
        format: native: this project's model class; deepseek: what stock transformers loads.
        stock_rope: RoPE of the deepseek format. default: frequencies that every engine computes;
            longrope: any frequencies, right in transformers only.
        calibration: A UTF-8 file, builtin:pydoc, or a dataset as ID[:CONFIG][@SPLIT][#COLUMN]; may be
            given several times.
        calibration_tokens: Tokens to calibrate on.
        statistics: Use statistics that --save-statistics wrote; no calibration.
        save_statistics: Keep the calibration's statistics for other conversions.
        seed: Seed of what is drawn of the texts.
        dtype: Write the weights in this dtype.
        max_shard_size: Largest weight file, as 500MB or 5GB.
        low_memory: Work on one layer of the model at a time, or hold all of it.
        device: Where calibration and refits compute, as cpu, cuda or cuda:1; several share the
            calibration text.
        bf16: Heal in bfloat16, where the recipe heals and the hardware is fast at it.
        push_to_hub: Send OUT to this repository, owner/name, once it is written; see `mla-convert
            push`.
        private: Make the repository private; one that is public already is refused.
        dry_run: Show the plan and write nothing.
        overwrite: Replace OUT if it exists, once the new one is whole.
        revision: Branch, tag or commit of the model on the hub.
        token: Access token for private and gated models on the hub.
        progress: Called as progress(stage, done, total) while it works.

    Returns:
        The object that --json prints.

    Raises:
        MLAConvertError: with what is wrong, and what to do about it.
    """

def evaluate(
    model: str | PathLike[str],
    *,
    text: str | None = None,
    against: str | None = None,
    context: int = 512,
    max_tokens: int | None = None,
    stride: int | None = None,
    batch_size: int = 1,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    record: bool = False,
    tasks: str | Sequence[str] | None = None,
    include_path: str | PathLike[str] | None = None,
    limit: int | None = None,
    fewshot: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure perplexity and cache bytes a token, or the figures of benchmark tasks.

    With --against also the KL divergence and the top-1 agreement between the two, on the same tokens;
    --revision and --token then go to both.

    Args:
        model: A folder that `mla-convert convert` wrote, or any source that it reads.
        text: A UTF-8 file, builtin:pydoc, or a dataset as ID[:CONFIG][@SPLIT][#COLUMN]. This or
            --tasks.
        against: Measure this model too, and how far the two agree.
        context: Tokens in a context.
        max_tokens: Use this many tokens from the text's start.
        stride: Slide the context by this many tokens instead of cutting disjoint ones.
        batch_size: Contexts that go through together.
        dtype: Compute, and hold the cache, in this dtype.
        record: With --against: write the result into MODEL's conversion.json, model card and report.
        tasks: Tasks of the lm-evaluation-harness (the extra `tasks`) instead of a text; repeatable, or
            by commas.
        include_path: With --tasks: a folder of task files of your own.
        limit: With --tasks: the first N documents of each, to try it out.
        fewshot: With --tasks: examples before each question.
        revision: Branch, tag or commit of the model on the hub.
        token: Access token for private and gated models on the hub.
        progress: Called as progress(stage, done, total) while it works.

    Returns:
        The object that --json prints.

    Raises:
        MLAConvertError: with what is wrong, and what to do about it.
    """

def export(
    model: str | PathLike[str],
    out: str | PathLike[str] | None = None,
    *,
    target: Literal["transformers", "vllm", "sglang", "gguf"] | None = None,
    dtype: Literal["float32", "bfloat16", "float16", "q8_0"] | None = None,
    form: Literal["stock", "custom"] | None = None,
    kv_rank: int | None = None,
    rope_dim: int | None = None,
    max_shard_size: str = "5GB",
    verify: bool = True,
    python: str | PathLike[str] | None = None,
    dry_run: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
    overwrite: bool = False,
    token: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a converted model in the form that an engine loads.

    Engines misread checkpoints without a word, so what was written is loaded again and compared with the model; where
    the answers differ it is kept as OUT.rejected, and the command fails.

    Args:
        model: A folder that `mla-convert convert` wrote.
        out: The folder to write; it appears whole or not at all. Not for --dry-run.
        target: What is to load it; with --dry-run all of them where none is given.
        dtype: Store the weights in this dtype; q8_0 for gguf only.
        form: Write this form or refuse: stock, an architecture that the engine has itself, or custom,
            this project's class.
        kv_rank: Pad the latent with zeros to this width.
        rope_dim: Pad the RoPE key likewise; even.
        max_shard_size: Of safetensors files.
        verify: Load what was written in the engine and compare its answers with the model's.
        python: The interpreter of the environment that the engine is installed in.
        dry_run: Say what would be written and whether it is exact, and write nothing.
        push_to_hub: Send OUT to this repository, owner/name, once it is written; see `mla-convert
            push`.
        private: Make the repository private; one that is public already is refused.
        overwrite: Replace OUT if it exists, once the new one is whole.
        token: Access token for private and gated models on the hub.
        progress: Called as progress(stage, done, total) while it works.

    Returns:
        The object that --json prints.

    Raises:
        MLAConvertError: with what is wrong, and what to do about it.
    """

def generate(
    model: str | PathLike[str],
    *,
    prompt: str | Sequence[str] | None = None,
    prompts: str | PathLike[str] | None = None,
    max_new_tokens: int = 64,
    chat: bool = False,
    temperature: float = 0.0,
    top_p: float | None = None,
    seed: int = 0,
    mode: Literal["auto", "absorbed", "expanded"] = "auto",
    backend: Literal["auto", "triton", "torch"] = "auto",
    cache_dtype: Literal["auto", "fp8"] = "auto",
    batch_size: int = 64,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    device: str = "cpu",
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Continue prompts.

    A converted model uses its latent cache, and the matrices of `mla-convert absorb` where they are there. It decodes
    several prompts together, and stores and computes once what they begin with in common.

    Of several prompts, each is printed under a line `--- prompt 2 of 5 ---`, with its continuation right behind it and
    an empty line before the next. Programs should take --json, which keeps prompts and continuations apart.

    Args:
        model: A folder that `mla-convert convert` wrote, or any source that it reads.
        prompt: What to continue; repeat it for several prompts.
        prompts: A UTF-8 file of prompts, one a line; in a .jsonl file a JSON string, or an object with
            a prompt, a line.
        max_new_tokens: Stop after this many tokens.
        chat: Put the prompt into the model's chat template.
        temperature: Sample at this temperature; 0 takes the likeliest token.
        top_p: Sample from the likeliest tokens that hold this share.
        seed: Seed of the sampling.
        mode: How a converted model attends: auto is absorbed for decoding, expanded for the prompt.
        backend: What decodes a converted model: auto is the Triton kernel where a GPU has it, else
            torch.
        cache_dtype: What a converted model's cache holds: auto is --dtype; fp8 is 8-bit latents with
            scales.
        batch_size: A converted model decodes up to this many prompts at once.
        dtype: Compute in this dtype.
        device: Compute there: cpu, cuda or cuda:N.
        revision: Branch, tag or commit of the model on the hub.
        token: Access token for private and gated models on the hub.
        progress: Called as progress(stage, done, total) while it works.

    Returns:
        The object that --json prints.

    Raises:
        MLAConvertError: with what is wrong, and what to do about it.
    """

def heal(
    model: str | PathLike[str],
    out: str | PathLike[str],
    *,
    teacher: str,
    text: str | Sequence[str],
    stage: Literal["layers", "global", "all"] = "layers",
    tokens: int = 32768,
    passes: int = 1,
    context: int = 512,
    held_out: float = 0.05,
    layer_steps: int = 200,
    layer_batch: int = 4,
    layer_rate: float = 0.003,
    layer_metric: Literal["fisher", "identity"] = "identity",
    optimizer: Literal["muon", "adamw"] = "muon",
    learning_rate: float = 0.0005,
    batch_size: int = 1,
    accumulate: int = 1,
    parameters: Literal["mla", "all"] = "mla",
    top_k: int | None = None,
    hidden_weight: float = 0.0,
    bf16: bool = False,
    gradient_checkpointing: bool = False,
    evaluate_every: int = 50,
    seed: int = 0,
    push_to_hub: str | None = None,
    private: bool = False,
    overwrite: bool = False,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train a converted model against its source.

    An interrupted run is gone on with by the same command, to the same result.

    Args:
        model: A folder that `mla-convert convert` wrote.
        out: The folder to write.
        teacher: The model that MODEL was converted from.
        text: What to train on, as for `convert --calibration`; may be given several times.
        stage: layers: each layer's attention against the source's, one after the other. global: the
            whole model against the source's predictions. all: the one, then the other.
        tokens: Training tokens, in equal shares of the texts.
        passes: global: how often a context may be trained on.
        context: Tokens in a context.
        held_out: How much of each text is kept to check on, from its end.
        layer_steps: layers: optimiser steps a layer.
        layer_batch: layers: contexts a step.
        layer_rate: layers: at the cosine's top.
        layer_metric: layers: measure errors by the loss's gradients, or in all directions alike.
        optimizer: muon (AdamW for what is no matrix), or adamw for all.
        learning_rate: global: at the cosine's top.
        batch_size: global: contexts a process takes at once.
        accumulate: global: such batches a step.
        parameters: global: train the attention blocks, or everything.
        top_k: global: learn the source's K likeliest tokens, kept on disk.
        hidden_weight: global: weight of the hidden states' distance.
        bf16: Compute in bfloat16; weights stay in float32.
        gradient_checkpointing: global: recompute activations, for less memory.
        evaluate_every: global: steps between checks on held-out text, and checkpoints.
        seed: Seed of the choice of contexts.
        push_to_hub: Send OUT to this repository, owner/name, once it is written; see `mla-convert
            push`.
        private: Make the repository private; one that is public already is refused.
        overwrite: Replace OUT if it exists, once the new one is whole.
        revision: Branch, tag or commit of the model on the hub.
        token: Access token for private and gated models on the hub.
        progress: Called as progress(stage, done, total) while it works.

    Returns:
        The object that --json prints.

    Raises:
        MLAConvertError: with what is wrong, and what to do about it.
    """

def inspect(
    source: str | PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Show what a source is, whether it converts exactly, what can hold it then, and what cache budgets give.

    Reads the config and the tensors' names and shapes, no weights. A source that cannot be converted is an error that
    says why.

    Args:
        source: A model ID on the Hugging Face hub, a folder with config.json and safetensors files, a
            .gguf file, or builtin:smollm2-135m.
        revision: Branch, tag or commit of the model on the hub.
        token: Access token for private and gated models on the hub.
        progress: Called as progress(stage, done, total) while it works.

    Returns:
        The object that --json prints.

    Raises:
        MLAConvertError: with what is wrong, and what to do about it.
    """

def plan(
    source: str | PathLike[str],
    *,
    recipe: str = "default",
    budget_gb: float | None = None,
    context: int | None = None,
    batch: int = 1,
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
    statistics: str | PathLike[str] | None = None,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Show what budgets of the cache give and take, before a conversion.

    For each budget: the sizes, the cache of so many sequences of a length, how many fit into a memory, what the
    conversion takes, and with --statistics what it is predicted to cost. A layer with a sliding window holds no more
    tokens than that.

    Args:
        source: A model ID on the Hugging Face hub, a folder with config.json and safetensors files, a
            .gguf file, or builtin:smollm2-135m.
        recipe: default, fast, balanced, best, another recipe's name, or a YAML file.
        budget_gb: Memory for the cache, beside the weights, in units of 10^9 bytes: how many sequences
            fit.
        context: Tokens of a sequence.
        batch: Sequences at once.
        dtype: Of the cache.
        statistics: Predict what each budget costs, from what `convert --save-statistics` kept of this
            source; reads the weights.
        revision: Branch, tag or commit of the model on the hub.
        token: Access token for private and gated models on the hub.
        progress: Called as progress(stage, done, total) while it works.

    Returns:
        The object that --json prints.

    Raises:
        MLAConvertError: with what is wrong, and what to do about it.
    """

def push(
    folder: str | PathLike[str],
    repo: str | PathLike[str],
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    token: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Send a finished folder to the Hugging Face hub.

    All files appear there in one commit. An interrupted upload goes on when the command is run again: what is
    stored already is not sent again.

    Args:
        folder: A folder that convert, heal or export wrote.
        repo: The repository as owner/name; made if it does not exist.
        private: Make the repository private; one that is public already is refused.
        revision: Write to this branch; made if it does not exist.
        message: The commit's message.
        overwrite: Replace what the repository holds: other files than those of FOLDER are deleted.
        dry_run: Show the files and the card's metadata, and make no request.
        token: Access token for private and gated models on the hub.
        progress: Called as progress(stage, done, total) while it works.

    Returns:
        The object that --json prints.

    Raises:
        MLAConvertError: with what is wrong, and what to do about it.
    """

def recipes(
    action: Literal["list", "show"] = "list",
    name: str | None = None,
    *,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """List the recipes, or show one as YAML with a comment on each key.

    What show prints can be saved, changed and given to `convert --recipe FILE`.

    Args:
        action: list them, or show one.
        name: For show: a recipe's name, or a YAML file.
        progress: Called as progress(stage, done, total) while it works.

    Returns:
        The object that --json prints.

    Raises:
        MLAConvertError: with what is wrong, and what to do about it.
    """

def report(
    model: str | PathLike[str],
    *,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write report.html and report.json into a converted folder.

    Every conversion, healing and recorded evaluation does so by itself: this is for folders of an earlier version.

    Args:
        model: A folder that `mla-convert convert` wrote.
        progress: Called as progress(stage, done, total) while it works.

    Returns:
        The object that --json prints.

    Raises:
        MLAConvertError: with what is wrong, and what to do about it.
    """

def verify(
    exported: str | PathLike[str],
    *,
    engine: Literal["transformers", "vllm", "llamacpp"],
    python: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Ask an engine what an export answers.

    The export holds what the converted model answered when it was made, so this works wherever the engine is
    installed. Fails when the answers differ.

    Args:
        exported: A folder that `mla-convert export` wrote.
        engine: What is to load it.
        python: The interpreter of the environment that the engine is installed in.
        progress: Called as progress(stage, done, total) while it works.

    Returns:
        The object that --json prints.

    Raises:
        MLAConvertError: with what is wrong, and what to do about it.
    """
