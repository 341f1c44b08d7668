"""What a fresh interpreter runs to answer a probe in transformers: transformers_engine.py hands it this text.

Reads the question from the JSON file that it is given, and writes its answers into a safetensors file and a report
beside it. Nothing of this package can be imported while it runs: what it loads has to be whole.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig


@torch.no_grad()
def main(question: Path, reply: Path) -> None:
    sys.modules["mla_convert"] = sys.modules["mla_kernels"] = None  # type: ignore[assignment]
    asked = json.loads(question.read_text(encoding="utf-8"))
    torch.set_num_threads(asked["threads"])
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        asked["folder"],
        dtype=torch.float32,
        trust_remote_code=asked["remote_code"],
        output_loading_info=True,
    )
    model, report = loaded[0].eval(), loaded[1]
    ids = torch.tensor([asked["prompt"]])
    distributions = model(ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    model.generation_config = GenerationConfig()  # which knows no token that ends a text
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked["new_tokens"], do_sample=False, pad_token_id=0
    )
    save_file({"distributions": distributions, "continuation": written[0, ids.shape[1] :].contiguous()}, reply)
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    loading = {key: sorted(map(str, report.get(key) or ())) for key in keys}
    reply.with_suffix(".json").write_text(json.dumps(loading), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
