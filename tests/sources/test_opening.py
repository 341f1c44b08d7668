from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from mla_convert.errors import SourceError, UnsupportedArchitectureError
from mla_convert.sources import Source, open_source
from mla_convert.sources.safetensors_reader import read_header
from tests.tiny import save_source, save_tensors, tiny_llama, tiny_qwen2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_source(tiny_llama(), tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_source(tiny_llama(), tmp_path / "sharded", shards=3)


def _refused(folder: Path | str, kind: type[SourceError] = SourceError) -> SourceError:
    with pytest.raises(kind) as caught:
        open_source(str(folder))
    return caught.value


def test_shards_read_as_the_single_file(folder: Path, sharded: Path) -> None:
    one, three = open_source(str(folder)), open_source(str(sharded))
    assert set(one.tensor_names()) == set(three.tensor_names())
    assert all(torch.equal(one.tensor(name), three.tensor(name)) for name in one.tensor_names())
    assert set(three.digests()) == {"config.json", "model.safetensors.index.json"} | {
        f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2, 3)
    }
    assert three.file_bytes() == sum(file.stat().st_size for file in sharded.glob("*.safetensors"))


def test_a_single_file_of_another_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert open_source(str(folder)).spec.num_layers == 2


def test_several_files_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert "index" in _refused(sharded).remedy


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "no config.json" in _refused(folder).message


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no safetensors weights" in _refused(folder).message


def test_a_config_that_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')
    assert "not readable JSON" in _refused(folder).message


@pytest.mark.parametrize("fields", [{"hidden_size": "wide"}, {"num_attention_heads": 7}])
def test_a_config_that_is_not_valid(folder: Path, fields: dict[str, object]) -> None:
    _edit_config(folder, **fields)
    _refused(folder)


def test_a_config_without_architecture(folder: Path) -> None:
    _edit_config(folder, architectures=None)
    assert "names no architecture" in _refused(folder, UnsupportedArchitectureError).message


def test_an_unknown_family_lists_the_known_ones(folder: Path) -> None:
    _edit_config(folder, architectures=["GemmaXForCausalLM"])
    error = _refused(folder, UnsupportedArchitectureError)
    assert "GemmaXForCausalLM" in error.message
    for known in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"):
        assert known in error.remedy


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in _refused(sharded).message


def test_an_index_that_names_an_absent_tensor(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.extra.weight"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    assert "model.layers.9.extra.weight" in _refused(sharded).message


def test_a_tensor_that_the_index_leaves_out_is_not_lost(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    assert "model.norm.weight" in open_source(str(sharded)).account()


@pytest.mark.parametrize("weight_map", [{}, {"model.norm.weight": "../../elsewhere.safetensors"}, [1]])
def test_a_damaged_index(sharded: Path, weight_map: object) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "not a safetensors index" in _refused(sharded).message


@pytest.mark.parametrize("keep", [0.9, 0.01, 0.00001])
def test_a_truncated_file_is_found_when_it_is_opened(folder: Path, keep: float) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    assert "truncated" in _refused(folder).message


def test_a_damaged_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(bytes(content))
    assert "damaged" in _refused(folder).message


def test_trailing_bytes(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 16)
    assert "damaged" in _refused(folder).message


def test_a_git_lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "git lfs pull" in _refused(folder).remedy


def test_weights_that_are_not_plain_floats(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_tensors({name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}, folder)
    assert "F8_E4M3" in _refused(folder, UnsupportedArchitectureError).message


def test_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "save_pretrained" in _refused(folder).remedy


def test_an_adapter_folder(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge" in _refused(tmp_path).remedy


def test_a_single_file_of_a_model(folder: Path) -> None:
    assert "give the folder" in _refused(folder / "model.safetensors").remedy


def test_the_loaded_model_holds_one_stored_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(save_source(tiny_llama(dtype=torch.bfloat16), tmp_path)))
    read = Source.tensor
    alive: list[weakref.ref[torch.Tensor]] = []

    def watched(self: Source, name: str) -> torch.Tensor:
        # The model holds float32 copies, so that every stored tensor read before must be gone by now.
        assert not [reference for reference in alive if reference() is not None]
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Source, "tensor", watched)
    source.load_model(dtype=torch.float32)
    assert len(alive) == len(source.tensor_names())


def test_loaded_parameters_can_be_trained(folder: Path) -> None:
    model = open_source(str(folder)).load_model(dtype=torch.float32)
    model(torch.arange(12)[None]).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_loading_leaves_the_source_as_it_was(folder: Path) -> None:
    source = open_source(str(folder))
    with torch.no_grad():
        source.load_model(dtype=torch.float32, attn_implementation="eager").model.norm.weight.zero_()
    assert source.tensor("model.norm.weight").abs().sum() > 0
    assert source.load_model(dtype=torch.float32).config._attn_implementation == "sdpa"


def test_a_tensor_that_is_not_there(folder: Path) -> None:
    with pytest.raises(SourceError, match="no tensor 'x'"):
        open_source(str(folder)).tensor("x")


def test_digests_change_with_the_files(folder: Path) -> None:
    before = open_source(str(folder)).digests()
    save_source(tiny_llama(seed=1), folder)
    after = open_source(str(folder)).digests()
    assert before["config.json"] == after["config.json"]
    assert before["model.safetensors"] != after["model.safetensors"]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "deepseek_v3", "mla_convert"])
def test_companions_load_under_any_model_type(tmp_path: Path, model_type: str) -> None:
    model = tiny_qwen2() if model_type == "qwen2" else tiny_llama()
    folder, out = save_source(model, tmp_path / "source"), tmp_path / "out"
    (folder / "LICENSE").write_text("free")
    out.mkdir()
    source = open_source(str(folder))
    source.save_companions(out)
    (out / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer, saved = source.load_tokenizer(), AutoTokenizer.from_pretrained(out)
    text = "the cat sat on 1234 mats,  didn't it?\n\tyes é"
    assert saved(text).input_ids == tokenizer(text).input_ids
    assert saved.decode(saved(text).input_ids) == text
    assert saved.chat_template == tokenizer.chat_template
    assert (out / "LICENSE").read_text() == "free"
    assert (out / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()


def test_a_source_without_tokenizer_still_opens(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    source = open_source(str(folder))
    with pytest.raises(SourceError, match="no tokenizer"):
        source.load_tokenizer()


def _edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_file_that_shrinks_after_it_was_opened_is_found_when_it_is_read(folder: Path) -> None:
    source = open_source(str(folder))
    file = folder / "model.safetensors"
    last = max(read_header(file).items(), key=lambda entry: entry[1].start)[0]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SourceError, match="changed while it was read"):
        source.tensor(last)
