"""What an interpreter with llama.cpp runs to answer a probe: llamacpp_engine.py hands it this text.

It imports nothing of ours. Reads the question from the JSON file that it is given, and writes its answers into another;
the distributions go into a file of float32 numbers, token by token.
"""

import array
import json
import secrets
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main(question: Path, reply: Path) -> None:
    asked = json.loads(question.read_text(encoding="utf-8"))
    prompt, vocabulary = asked["prompt"], asked["vocabulary"]
    server, letter = serve(asked), asked["letter"]
    with Path(asked["distributions"]).open("wb") as file:
        for end in range(1, len(prompt)):
            found = following(server, prompt[:end], vocabulary, letter)
            array.array("f", [found[token] for token in range(vocabulary)]).tofile(file)
    # Written token by token, since a request of several would end with the text. The prompt is read anew, as one batch.
    continuation: list[int] = []
    for step in range(asked["new_tokens"]):
        found = following(server, prompt + continuation, 1, letter, reuse=step > 0)
        continuation.append(max(found, key=lambda token: found[token]))
    reply.write_text(json.dumps({"continuation": continuation}), encoding="utf-8")


def serve(asked: dict[str, Any]) -> Any:
    """Load the file, for computing as exactly as llama.cpp can: the cache in float32, one sequence."""
    xllamacpp: Any = import_module("xllamacpp")  # whose names are made in C

    params = xllamacpp.CommonParams()
    params.model.path = asked["file"]
    params.n_ctx = len(asked["prompt"]) + asked["new_tokens"] + 1
    params.n_parallel = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.fit_params = params.warmup = params.ctx_shift = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
    params.n_gpu_layers, params.no_op_offload = 0, True
    params.api_keys = [secrets.token_hex()]  # it listens on a local port as well
    params.verbosity = 3  # at less, llama.cpp does not say why it refuses a file
    return xllamacpp.Server(params)


def following(server: Any, tokens: list[int], count: int, letter: int, *, reuse: bool = True) -> dict[int, float]:
    """The `count` most probable tokens after `tokens`, each with log p.

    What is sampled is always `letter`, since the server keeps its answer back while a token is half a character; the
    log-probabilities are those before sampling.
    """
    answer = server.handle_completions(
        {
            "prompt": tokens,
            "max_tokens": 1,
            "logprobs": count,
            "temperature": 0.0,
            "logit_bias": [[letter, 1e9]],
            "cache_prompt": reuse,
        }
    )
    if "choices" not in answer:
        raise RuntimeError(f"llama.cpp answered {json.dumps(answer)[:500]}")
    [content] = answer["choices"][0]["logprobs"]["content"]
    return {entry["id"]: entry["logprob"] for entry in content["top_logprobs"]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
