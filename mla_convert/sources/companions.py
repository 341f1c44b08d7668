"""What accompanies the weights: tokenizer, generation config, licence; from a folder or from inside a GGUF file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mla_convert.errors import SourceError
from mla_convert.sources.gguf_reader import read_once
from mla_convert.sources.licence import licence_of_folder, licence_of_gguf

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

_LICENSES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "COPYING*")
_GENERATION = "generation_config.json"


class Companions(Protocol):
    """The files beside the weights, wherever they come from."""

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The source's tokenizer, with its chat template."""
        ...

    def generation_config(self, config: PretrainedConfig) -> GenerationConfig:
        """The stated generation config, or one made from the ids in ``config``."""
        ...

    def save_others(self, config: PretrainedConfig, folder: Path) -> None:
        """Write the generation config and any licence files into ``folder``."""
        ...

    def described_by(self) -> tuple[Path, ...]:
        """The files that hold the config, where they are not the weights themselves."""
        ...

    def licence(self) -> dict[str, Any]:
        """What is stated of the licence, in the words of the hub's model cards; empty if nothing is."""
        ...


class FolderCompanions:
    """The files beside ``config.json`` in a model folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        return _auto_tokenizer(self._folder, self._folder)

    def generation_config(self, config: PretrainedConfig) -> GenerationConfig:
        from transformers import GenerationConfig

        if (self._folder / _GENERATION).is_file():
            return GenerationConfig.from_pretrained(self._folder)
        return GenerationConfig.from_model_config(config)

    def save_others(self, config: PretrainedConfig, folder: Path) -> None:
        # Copied as it is where there is one: transformers refuses to write some generation configs that it reads.
        if (self._folder / _GENERATION).is_file():
            shutil.copyfile(self._folder / _GENERATION, folder / _GENERATION)
        else:
            self.generation_config(config).save_pretrained(folder)
        for pattern in _LICENSES:
            for found in sorted(self._folder.glob(pattern)):
                if found.is_file():
                    shutil.copyfile(found, folder / found.name)

    def described_by(self) -> tuple[Path, ...]:
        return (self._folder / "config.json",)

    def licence(self) -> dict[str, Any]:
        return licence_of_folder(self._folder)


class GGUFCompanions:
    """The tokenizer and token ids inside a GGUF file, read by transformers."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self._path = path
        self._reader = reader

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        with read_once(self._path, self._reader):
            return _auto_tokenizer(self._path.parent, self._path, gguf_file=self._path.name)

    def generation_config(self, config: PretrainedConfig) -> GenerationConfig:
        from transformers import GenerationConfig

        return GenerationConfig.from_model_config(config)

    def save_others(self, config: PretrainedConfig, folder: Path) -> None:
        self.generation_config(config).save_pretrained(folder)

    def described_by(self) -> tuple[Path, ...]:
        return ()

    def licence(self) -> dict[str, Any]:
        return licence_of_gguf(self._reader)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write ``tokenizer`` with its chat template so that any model type loads it as it is.

    transformers chooses a tokenizer class by the model type and some of those rebuild the tokenizer by rules of their
    own; naming the generic class makes the written ``tokenizer.json`` the whole truth.
    """
    tokenizer.save_pretrained(folder)
    if not (folder / "tokenizer.json").is_file():
        return
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for local in ("auto_map", "is_local", "local_files_only"):
        settings.pop(local, None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _auto_tokenizer(folder: Path, shown: Path, **options: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # of a damaged tokenizer.json the tokenizers library raises no narrower one
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, KeyError):
            first_line = f"it lacks {first_line}"
        raise SourceError(
            f"no tokenizer can be loaded from '{shown}': {first_line}",
            "put the model's tokenizer.json and tokenizer_config.json beside its weights",
        ) from error
