"""A native model, a table that stands for a model, and a tokenizer of single bytes; no file behind them."""

from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mla_convert.mla import MLAConfig, MLAForCausalLM


class FixedLogits:
    """Stands for a model: its logits are a table indexed by the token before; it remembers what it was asked."""

    device = torch.device("cpu")

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.calls: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, **options) -> SimpleNamespace:
        self.calls.append(input_ids)
        return SimpleNamespace(logits=self.table[input_ids])


def tiny_native(seed: int = 0, **changes) -> MLAForCausalLM:
    """C + R = 10 + 4 numbers a token in each of 3 layers."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "kv_lora_rank": 10,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "initializer_range": 0.3,
    }
    return MLAForCausalLM(MLAConfig(**sizes | changes)).eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, 256 in all, and an end token 256; a byte's id is its rank in the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", model_max_length=16)
