import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mla_convert.decode import ABSORBED_FILE, attach_absorbed, save_absorbed
from mla_convert.decode import absorbed as module
from mla_convert.errors import FormatError, MLAConvertError, OutputError, SourceError, VerificationError
from mla_convert.mla import MLAForCausalLM
from tests.evaluate.models import tiny_native
from tests.tiny import tiny_llama

HEADS, NOPE, VALUE, RANK, WIDTH, LAYERS = 4, 8, 6, 10, 32, 3


@pytest.fixture
def folder(tmp_path):
    tiny_native().save_pretrained(tmp_path)
    return tmp_path


def decode_logits(model: MLAForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the last token, after a prefill of the others."""
    with torch.no_grad():
        outputs = model(tokens[:, :-1], use_cache=True)
        cache = next(outputs[name] for name in ("cache", "past_key_values") if name in outputs)
        return model(tokens[:, -1:], past_key_values=cache).logits


@pytest.mark.parametrize(
    ("merge", "merged"),
    # Merged 4·10·32 = 1,280 numbers against 4·10·6 + 32·4·6 = 1,008 apart.
    [("auto", False), ("never", False), ("always", True)],
)
def test_says_what_it_wrote(folder, merge, merged):
    summary = save_absorbed(folder, merge)
    assert (summary.file, summary.merged, summary.layers) == (folder / ABSORBED_FILE, merged, LAYERS)
    last = WIDTH if merged else VALUE
    assert summary.nbytes == 4 * LAYERS * (HEADS * NOPE * RANK + HEADS * RANK * last)
    with safe_open(summary.file, framework="pt") as written:
        metadata = written.metadata()
        shapes = {name: written.get_tensor(name).shape for name in written.keys()}  # noqa: SIM118 - not a mapping
    name = "w_comb" if merged else "w_uv_t"
    assert json.loads(metadata["shapes"]) == {"w_uk": [HEADS, NOPE, RANK], name: [HEADS, RANK, last]}
    assert (metadata["merge"], json.loads(metadata["merged"])) == (merge, merged)
    assert shapes == {
        f"layers.{i}.{part}": torch.Size(shape)
        for i in range(LAYERS)
        for part, shape in json.loads(metadata["shapes"]).items()
    }


@pytest.mark.parametrize("merge", ["never", "always"])
def test_holds_the_weights_of_every_layer_in_decode_layout(folder, merge):
    save_absorbed(folder, merge)
    written = load_file(folder / ABSORBED_FILE)
    weights = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.self_attn"
        w_o = weights[f"{prefix}.o_proj.weight"]
        for head in range(HEADS):
            rows = weights[f"{prefix}.kv_b_proj.weight"][head * (NOPE + VALUE) :][: NOPE + VALUE]
            assert torch.equal(written[f"layers.{layer}.w_uk"][head], rows[:NOPE])
            if merge == "never":
                assert torch.equal(written[f"layers.{layer}.w_uv_t"][head], rows[NOPE:].T)
            else:
                w_o_head = w_o[:, head * VALUE :][:, :VALUE]
                expected = (w_o_head.double() @ rows[NOPE:].double()).T.float()
                assert torch.equal(written[f"layers.{layer}.w_comb"][head], expected)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("merge", ["never", "always"])
def test_attached_matrices_change_nothing_in_the_logits(tmp_path, merge, biased):
    model = tiny_native(query_bias=biased, latent_bias=biased, output_bias=biased)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path)
    tokens = torch.arange(2 * 9).view(2, 9)
    model.set_attention_mode("expanded")
    expected = decode_logits(model, tokens)

    save_absorbed(tmp_path, merge)
    loaded = MLAForCausalLM.from_pretrained(tmp_path).eval()
    assert attach_absorbed(loaded, tmp_path)
    # kv_b_proj is spoilt: a result that is still right used what was attached.
    for layer in loaded.model.layers:
        layer.self_attn.attention_mode = "absorbed"
        layer.self_attn.kv_b_proj.weight.data.fill_(float("nan"))
    # float32 sums in another order, on logits of size 10.
    torch.testing.assert_close(decode_logits(loaded, tokens), expected, atol=1e-4, rtol=0)


def test_attached_matrices_take_the_models_dtype(folder):
    save_absorbed(folder)
    model = MLAForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    attach_absorbed(model, folder)
    assert {layer.self_attn.absorbed.w_uk.dtype for layer in model.model.layers} == {torch.bfloat16}


def test_sharded_weights_give_the_same_matrices(folder, tmp_path):
    sharded = tmp_path / "sharded"
    tiny_native().save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert save_absorbed(sharded).digest == save_absorbed(folder).digest
    whole, found = load_file(folder / ABSORBED_FILE), load_file(sharded / ABSORBED_FILE)
    assert whole.keys() == found.keys()
    assert all(torch.equal(whole[name], found[name]) for name in whole)


def test_the_file_is_not_mistaken_for_weights(folder):
    save_absorbed(folder)
    _, info = MLAForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_there_may_be_nothing_to_attach(folder):
    model = MLAForCausalLM.from_pretrained(folder)
    assert attach_absorbed(model, folder) is False
    assert model.model.layers[0].self_attn.absorbed is None


def test_refuses_matrices_of_other_weights_of_the_same_shapes(folder):
    save_absorbed(folder)
    tiny_native(seed=1).save_pretrained(folder)
    model = MLAForCausalLM.from_pretrained(folder)
    with pytest.raises(VerificationError, match="other weights") as raised:
        attach_absorbed(model, folder)
    assert raised.value.remedy == "run mla-convert absorb again"
    assert model.model.layers[0].self_attn.absorbed is None


def test_refuses_a_truncated_file(folder):
    file = save_absorbed(folder).file
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(VerificationError, match="damaged"):
        attach_absorbed(MLAForCausalLM.from_pretrained(folder), folder)


def test_refuses_a_file_that_lacks_a_layer(folder):
    file = save_absorbed(folder).file
    with safe_open(file, framework="pt") as written:
        metadata = written.metadata()
    tensors = load_file(file)
    del tensors["layers.1.w_uv_t"]
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(VerificationError, match="layer 1"):
        attach_absorbed(MLAForCausalLM.from_pretrained(folder), folder)


def test_refuses_a_model_of_another_class(folder):
    save_absorbed(folder)
    with pytest.raises(FormatError, match="LlamaForCausalLM"):
        attach_absorbed(tiny_llama(), folder)


def test_refuses_a_folder_of_another_format(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(FormatError, match="llama"):
        save_absorbed(tmp_path)


def test_refuses_a_folder_without_a_config(tmp_path):
    with pytest.raises(SourceError, match=r"config\.json"):
        save_absorbed(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_refuses_damaged_weights_and_leaves_nothing(folder, damage):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if damage == "truncated":
        weights.write_bytes(content[:-100])
    with pytest.raises(MLAConvertError, match="kv_b_proj"):
        save_absorbed(folder)
    assert not list(folder.glob("*absorbed*"))


def test_a_failed_write_leaves_the_old_file(folder, monkeypatch):
    before = save_absorbed(folder, "never").file.read_bytes()

    def fill_the_disk(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", fill_the_disk)
    with pytest.raises(OutputError, match="No space left"):
        save_absorbed(folder, "always")
    assert (folder / ABSORBED_FILE).read_bytes() == before
    assert [path.name for path in folder.iterdir() if "absorbed" in path.name] == [ABSORBED_FILE]


def test_reports_progress(folder):
    calls = []
    save_absorbed(folder, progress=lambda *call: calls.append(call))
    assert calls == [("absorption", i, LAYERS) for i in (1, 2, 3)]


@pytest.mark.parametrize("merge", ["auto", "never", "always"])
def test_layers_of_different_ranks(tmp_path, merge):
    sizes = {"kv_lora_rank": 20, "kv_lora_ranks": [3, 20, 8], "qk_rope_head_dims": [4, 2, 0]}
    model, tokens = tiny_native(**sizes), torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = decode_logits(model, tokens)
    model.save_pretrained(tmp_path)
    summary = save_absorbed(tmp_path, merge)
    # rank 3 alone would merge (384 < 840), the layers together would not: 4·31·32 = 3,968 against 4·31·6 + 3·768
    assert summary.merged is (merge == "always")
    last = WIDTH if summary.merged else VALUE
    assert summary.nbytes == 4 * HEADS * 31 * (NOPE + last)
    with safe_open(summary.file, framework="pt") as written:
        shapes = json.loads(written.metadata()["shapes"])
    assert [layer["w_uk"] for layer in shapes] == [[HEADS, NOPE, rank] for rank in (3, 20, 8)]
    assert attach_absorbed(model, tmp_path)
    torch.testing.assert_close(decode_logits(model, tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("merge", ["never", "always"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_written_is_compared_with_the_weights(tmp_path, merge, dtype):
    tiny_native().to(dtype).save_pretrained(tmp_path)
    error = save_absorbed(tmp_path, merge).error
    # only the merged product is rounded anew
    assert error <= (4 * torch.finfo(dtype).eps if merge == "always" else 1e-12)


@pytest.mark.parametrize("part", ["w_uk", "w_uv_t", "w_comb"])
def test_matrices_that_answer_otherwise_are_not_kept(folder, monkeypatch, part):
    right = module.absorb_layer

    def wrong(*weights, merge):
        matrices = right(*weights, merge=merge)
        getattr(matrices, part)[0, 0, 0] += 0.01
        return matrices

    monkeypatch.setattr(module, "absorb_layer", wrong)
    with pytest.raises(VerificationError, match="layer 0 are off by"):
        save_absorbed(folder, "always" if part == "w_comb" else "never")
    assert not list(folder.glob("*absorbed*"))
