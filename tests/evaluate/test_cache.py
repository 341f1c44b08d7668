from types import SimpleNamespace

import pytest
import torch

from mla_convert.errors import UsageError
from mla_convert.evaluate.cache import cache_bytes_per_token, held_bytes, prefill
from mla_convert.mla import MLAForCausalLM
from tests.evaluate.models import tiny_native
from tests.tiny import tiny_llama


@pytest.fixture
def native() -> MLAForCausalLM:
    return tiny_native()


@pytest.mark.parametrize(("kind", "kv_heads"), [("MQA", 1), ("GQA", 2), ("MHA", 4)])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_llama_caches_keys_and_values_of_every_kv_head(kind, kv_heads, dtype, size):
    model = tiny_llama(kind, dtype=dtype)
    assert cache_bytes_per_token(model) == 2 * kv_heads * 16 * 2 * size


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_native_mla_caches_the_latent_and_the_rope_key(native, dtype, size):
    assert cache_bytes_per_token(native.to(dtype)) == (10 + 4) * 3 * size


def test_native_layers_of_different_sizes_cache_each_its_own():
    model = tiny_native(kv_lora_rank=20, kv_lora_ranks=[3, 20, 8], qk_rope_head_dims=[4, 2, 0])
    assert cache_bytes_per_token(model) == (3 + 4 + 20 + 2 + 8 + 0) * 4


def test_native_cache_holds_nothing_else_after_1000_tokens(native):
    assert held_bytes(prefill(native, 1000)) == (10 + 4) * 3 * 1000 * 4


def test_native_cache_holds_nothing_else_after_decoding(native):
    generated = native.generate(
        torch.ones(1, 9, dtype=torch.long),
        attention_mask=torch.ones(1, 9, dtype=torch.long),
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    cache = next(getattr(generated, name) for name in ("cache", "past_key_values") if hasattr(generated, name))
    # The last token that was generated has not gone through the model.
    assert held_bytes(cache) == (10 + 4) * 3 * (9 + 7) * 4


def test_a_view_holds_the_storage_it_looks_into():
    whole = torch.zeros(100, 8)
    assert held_bytes([whole[:1]]) == 100 * 8 * 4


def test_shared_storage_counts_once_and_expanded_tensors_as_stored():
    whole = torch.zeros(100, 8)
    assert held_bytes([whole[:50], whole[50:], whole]) == 100 * 8 * 4
    assert held_bytes((torch.zeros(1, 8).expand(100, 8),)) == 8 * 4


def test_finds_tensors_in_attributes_slots_containers_and_cycles():
    class Slotted:
        __slots__ = ("empty", "rows")

    slotted = Slotted()
    slotted.rows = torch.zeros(3)
    cache = SimpleNamespace(layers=[{"keys": torch.zeros(5)}, slotted], weights=torch.nn.Linear(4, 4))
    cache.itself = cache
    assert held_bytes(cache) == (5 + 3) * 4


def test_refuses_a_model_without_a_cache(llama):
    class Forgetful(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, **options):
            return SimpleNamespace(logits=torch.zeros(1, 1, 61))

    with pytest.raises(UsageError, match="no cache"):
        cache_bytes_per_token(Forgetful())
    with pytest.raises(UsageError, match="no growth"):
        cache_bytes_per_token(llama, lengths=(8, 8))
