"""What an interpreter with vLLM runs to answer a probe: vllm_engine.py hands it this text.

It imports nothing of ours. Reads the question from the JSON file that it is given, and writes its answers into another,
or what went wrong.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# C + R of the one latent that vLLM's kernels for a CPU are compiled for. Others are expanded into heads there.
CPU_LATENT = 576


def main(question: Path, reply: Path) -> None:
    asked = json.loads(question.read_text(encoding="utf-8"))
    try:
        answers = answer(asked)
    except Exception as error:  # whatever an engine raises, in one process with this, is what its user would see
        said = " ".join(str(error).split())
        answers = {"error": f"{type(error).__name__}: {said}"}
    reply.write_text(json.dumps(answers), encoding="utf-8")


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    if asked["shipped_code"]:
        sys.modules["mla_convert"] = None  # pyright: ignore[reportArgumentType] - the folder's own code is asked
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    on_cpu = current_platform.is_cpu()
    latent = asked["latent"] == CPU_LATENT or not on_cpu
    if not latent:
        os.environ["VLLM_MLA_DISABLE"] = "1"
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        model=asked["folder"],
        model_impl=asked["implementation"],
        trust_remote_code=asked["shipped_code"],
        skip_tokenizer_init=True,
        # GPU kernels for a latent take 16-bit numbers only, and so does one of the two for a CPU.
        dtype="float32" if on_cpu else "auto",
        attention_backend="CPU_MLA" if on_cpu and latent else None,
        kv_cache_dtype="auto",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=len(asked["prompt"]) + asked["new_tokens"],
        max_num_seqs=1,
        seed=0,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=asked["new_tokens"], ignore_eos=True, prompt_logprobs=0, detokenize=False
    )
    [output] = engine.generate([{"prompt_token_ids": asked["prompt"]}], sampling, use_tqdm=False)
    given = zip(asked["prompt"][1:], output.prompt_logprobs[1:], strict=True)
    return {
        "logprobs": [of_token[token].logprob for token, of_token in given],
        "continuation": list(output.outputs[0].token_ids),
        **used(engine.llm_engine),
    }


def used(engine: Any) -> dict[str, Any]:
    """What attends in each layer, what computes the rest, and what is cached: read off the engine, which runs here."""
    attentions = engine.vllm_config.compilation_config.static_forward_context.values()
    runner = engine.model_executor.driver_worker.worker.model_runner
    cached = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups for _ in group.layer_names]
    return {
        "attention": [type(layer).__name__ for layer in attentions],
        "backend": " and ".join(sorted({layer.get_attn_backend().get_name() for layer in attentions})),
        "model_class": type(runner.model).__name__,
        "cache_bytes": sum(spec.page_size_bytes // spec.block_size for spec in cached),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
