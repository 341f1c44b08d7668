"""From a reference to an open source: config, headers and adapter, and no weights yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mla_convert.errors import SourceError, UnsupportedArchitectureError
from mla_convert.sources.adapter import Adapter
from mla_convert.sources.checkpoint import Checkpoint
from mla_convert.sources.companions import Companions, FolderCompanions, GGUFCompanions
from mla_convert.sources.fp8_checkpoint import open_float8
from mla_convert.sources.gguf_config import INTERLEAVED, gguf_architecture, gguf_config
from mla_convert.sources.gguf_reader import GGUFCheckpoint, open_reader
from mla_convert.sources.quantisation import refuse_quantised
from mla_convert.sources.refusals import adapter_folder, refuse_architecture
from mla_convert.sources.registry import adapter_for, known_architectures
from mla_convert.sources.resolve import resolve
from mla_convert.sources.safetensors_reader import has_safetensors, open_safetensors
from mla_convert.sources.source import Source


def open_source(ref: str, *, revision: str | None = None, token: str | None = None) -> Source:
    """Open ``ref`` by reading its config and tensor headers only.

    Args:
        ref: ``builtin:smollm2-135m``, the path of a GGUF file, a local folder (``config.json`` and safetensors, or one
            GGUF file), or else a hub model ID.
        revision: branch, tag or commit of a hub model.
        token: access token for a gated or private hub model.

    Raises:
        SourceError: nothing usable is there: no config, a missing shard, a truncated file, no network.
        UnsupportedArchitectureError: the family, or a feature of the model, has no adapter.
        UnaccountedTensorError: the tensors are not those that the config asks for.
    """
    path = resolve(ref, revision=revision, token=token)
    gguf = path if path.is_file() else _gguf_of_folder(path)
    return _open_gguf(ref, gguf) if gguf is not None else _open_folder(ref, path)


def _gguf_of_folder(folder: Path) -> Path | None:
    """The folder's GGUF file when that is what it holds instead of safetensors; None when it is a model folder.

    Raises:
        SourceError: the folder holds no model, or several GGUF files.
    """
    if has_safetensors(folder) and (folder / "config.json").is_file() and not _only_adapter(folder):
        return None
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        shown = ", ".join(file.name for file in files[:4])
        raise SourceError(f"'{folder}' holds {len(files)} GGUF files: {shown}", "give the path of one of them")
    if (folder / "adapter_config.json").is_file():
        raise adapter_folder(folder)
    if not (folder / "config.json").is_file():
        raise SourceError(f"'{folder}' has no config.json", "give the folder of a Hugging Face model, or a GGUF file")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise SourceError(
            f"'{folder}' holds PyTorch pickle files but no safetensors",
            "convert them first: load the model in transformers and call save_pretrained on it",
        )
    raise SourceError(
        f"'{folder}' has a config.json but no safetensors weights",
        "put its safetensors files beside it; a model published as PyTorch pickles has to be converted first",
    )


def _only_adapter(folder: Path) -> bool:
    """Whether what lies there are an adapter's weights, even if a config.json was saved beside them."""
    files = {file.name for file in folder.glob("*.safetensors")}
    return files == {"adapter_model.safetensors"} and (folder / "adapter_config.json").is_file()


def _open_folder(ref: str, folder: Path) -> Source:
    fields = _read_config(folder / "config.json")
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list) or not architectures:
        raise UnsupportedArchitectureError(
            f"'{folder / 'config.json'}' names no architecture", "list the model's class in `architectures`"
        )
    refuse_architecture(fields, known_architectures())
    refuse_quantised(fields, folder)
    stored = open_safetensors(folder)
    # Taken out, or transformers would quantise what is read here.
    quantisation = fields.pop("quantization_config", None) or fields.pop("compression_config", None)
    checkpoint = open_float8(stored, quantisation) if quantisation else stored
    return _open(ref, adapter_for(str(architectures[0])), fields, checkpoint, FolderCompanions(folder))


def _open_gguf(ref: str, path: Path) -> Source:
    reader = open_reader(path)
    kind = gguf_architecture(reader, path)
    fields = gguf_config(reader, path)
    heads = (fields["num_attention_heads"], fields["num_key_value_heads"]) if kind in INTERLEAVED else None
    checkpoint = GGUFCheckpoint(path, reader, interleaved_heads=heads)
    return _open(ref, adapter_for(fields["architectures"][0]), fields, checkpoint, GGUFCompanions(path, reader))


def _open(ref: str, adapter: Adapter, fields: dict[str, Any], checkpoint: Checkpoint, companions: Companions) -> Source:
    from huggingface_hub.errors import StrictDataclassError

    checkpoint = adapter.named(checkpoint)
    names = checkpoint.names()
    if not names:
        raise SourceError(f"'{ref}' holds no tensors", "fetch its weights again")
    scaling = fields.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") == "su":  # what the first Phi-3 files called longrope
        fields = fields | {"rope_scaling": scaling | {"type": "longrope"}}
    try:
        config = adapter.config_class().from_dict(fields)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise SourceError(f"the config of '{ref}' is not valid: {said}", "fetch config.json again") from error
    head, embedding = adapter.head, adapter.embedding
    both = head in names and embedding in names
    if config.tie_word_embeddings and both and not checkpoint.equal_bytes(head, embedding):
        # As transformers does: two different matrices are not tied, whatever the config says.
        config.tie_word_embeddings = False
    spec = adapter.spec(config, checkpoint)
    return Source(ref, adapter, config, spec, checkpoint, companions)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"'{path}' is not readable JSON: {error}", "fetch it again") from error
    if not isinstance(fields, dict):
        raise SourceError(f"'{path}' is not a model config", "fetch it again")
    return fields
