import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from mla_convert.errors import SourceError
from mla_convert.evaluate import load_for_evaluation
from mla_convert.mla import MLAForCausalLM
from tests.evaluate.models import byte_tokenizer, tiny_native
from tests.tiny import save_source, tiny_qwen2

TOKENS = torch.arange(12).view(1, 12)


@pytest.fixture
def native_folder(tmp_path):
    model = tiny_native(vocab_size=257)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path, model


def test_loads_a_native_folder_with_its_tokenizer(native_folder):
    folder, written = native_folder
    model, tokenizer = load_for_evaluation(str(folder), torch.float32)
    assert isinstance(model, MLAForCausalLM)
    assert not model.training
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, written(TOKENS).logits)
    assert tokenizer.decode(tokenizer("héllo")["input_ids"]) == "héllo"


def test_loads_in_the_dtype_asked_for(native_folder):
    model, _ = load_for_evaluation(str(native_folder[0]), torch.bfloat16)
    assert model.dtype == torch.bfloat16


def test_loads_a_stock_deepseek_folder_with_transformers_own_class(tmp_path):
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    written = DeepseekV3ForCausalLM(config).eval()
    written.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model, _ = load_for_evaluation(str(tmp_path), torch.float32)
    assert type(model) is DeepseekV3ForCausalLM
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, written(TOKENS).logits)


def test_refuses_a_folder_that_lacks_a_tensor(native_folder):
    folder, _ = native_folder
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.kv_b_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match="kv_b_proj") as raised:
        load_for_evaluation(str(folder), torch.float32)
    assert raised.value.remedy


def test_refuses_a_truncated_weight_file(native_folder):
    folder, _ = native_folder
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SourceError, match="cannot be loaded"):
        load_for_evaluation(str(folder), torch.float32)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_refuses_a_config_that_is_no_json_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SourceError, match="not a JSON object"):
        load_for_evaluation(str(tmp_path), torch.float32)


def test_opens_everything_else_as_a_source(tmp_path):
    written = tiny_qwen2()
    save_source(written, tmp_path, shards=2)
    model, tokenizer = load_for_evaluation(str(tmp_path), torch.float32)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, written(TOKENS).logits)
    assert tokenizer.decode(tokenizer("the cat")["input_ids"]) == "the cat"
