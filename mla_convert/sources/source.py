"""An open source: its description, its tensors one at a time, and the model itself when it is asked for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mla_convert.sources.adapter import Adapter
from mla_convert.sources.attention import AttentionWeights
from mla_convert.sources.checkpoint import Checkpoint, check_finite
from mla_convert.sources.companions import Companions, save_tokenizer
from mla_convert.sources.loading import build_model
from mla_convert.sources.roles import Copied, Part, Role
from mla_convert.spec import SourceSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from mla_convert.mla import MLAForCausalLM


class Source:
    """A checkpoint and its adapter, read lazily; made by :func:`~mla_convert.sources.open_source`.

    Attributes:
        ref: the reference as the user gave it.
        spec: what the conversion needs to know.
        config: transformers' config of the source.
    """

    def __init__(
        self,
        ref: str,
        adapter: Adapter,
        config: PretrainedConfig,
        spec: SourceSpec,
        checkpoint: Checkpoint,
        companions: Companions,
    ) -> None:
        self.ref = ref
        self.spec = spec
        self.config = config
        self._adapter = adapter
        self._checkpoint = checkpoint
        self._companions = companions
        self._roles = adapter.account(spec, checkpoint)
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._digests: dict[str, str] | None = None

    def tensor_names(self) -> tuple[str, ...]:
        """The names of the stored tensors, as Hugging Face spells them (for GGUF too)."""
        return self._checkpoint.names()

    def tensor(self, name: str) -> Tensor:
        """One tensor, read now, in the dtype it is stored in (GGUF: dequantised to float32).

        Raises:
            SourceError: there is no such tensor, it cannot be read, or a number of it is not finite.
        """
        tensor = self._checkpoint.read(name)
        check_finite(name, tensor, self.ref)
        return tensor

    def attention(self, layer: int) -> AttentionWeights:
        """The attention weights and biases of ``layer``, read now, by heads and in rotate-half order."""
        return self._adapter.attention(self.spec, self.tensor, layer)

    def account(self) -> Mapping[str, Role]:
        """The role of every stored tensor: converted, copied, or dropped for a reason."""
        return dict(self._roles)

    def copied(self, layer: int | None) -> Iterator[tuple[str, Part]]:
        """Pairs (source name, the part of it that is copied and its new name) of ``layer``, for None outside layers.

        Of tied embeddings only the embedding is listed.
        """
        for name, role in self._roles.items():
            if isinstance(role, Copied) and role.layer == layer:
                yield from ((name, part) for part in role.parts)

    def load_model(
        self, *, dtype: torch.dtype, attn_implementation: str = "sdpa", device: str = "cpu"
    ) -> PreTrainedModel:
        """The source as transformers' own class, in evaluation mode, its weights read tensor by tensor.

        At its peak it holds one copy of the weights in ``dtype`` and one tensor as it is stored.

        Args:
            attn_implementation: ``sdpa`` becomes ``eager`` where scores are capped or the class has no other.
        """
        if self.spec.attention_softcap is not None and attn_implementation == "sdpa":
            attn_implementation = "eager"  # transformers 5.17's sdpa leaves the cap out without a word
        return build_model(
            self._adapter.model_class(),
            self.config,
            self._adapter.module_tensors(self.spec, self.tensor),
            head=self._adapter.head,
            generation_config=self._companions.generation_config(self.config),
            dtype=dtype,
            attn_implementation=attn_implementation,
            device=device,
        )

    def load_decoder(self, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> MLAForCausalLM:
        """The source as the native model around its own attention: the same modules whatever its family.

        See :func:`~mla_convert.sources.decoder.load_decoder`.
        """
        from mla_convert.sources.decoder import load_decoder  # transformers' models, which opening does without

        return load_decoder(self, dtype=dtype, device=device)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The source's tokenizer with its chat template; the same object each time, for reading one takes seconds.

        Raises:
            SourceError: the source has none that transformers can load.
        """
        if self._tokenizer is None:
            self._tokenizer = self._companions.load_tokenizer()
        return self._tokenizer

    def save_companions(self, folder: Path) -> None:
        """Write tokenizer, chat template, generation config and licence files into ``folder``.

        Raises:
            SourceError: the source has no tokenizer that can be loaded.
        """
        save_tokenizer(self.load_tokenizer(), folder)
        self._companions.save_others(self.config, folder)

    def licence(self) -> dict[str, Any]:
        """``license``, ``license_name`` and ``license_link`` as the source states them; empty if it states none."""
        return self._companions.licence()

    def digests(self) -> dict[str, str]:
        """SHA-256 of the weight files and of the config, by file name; computed once."""
        if self._digests is None:
            files = (*self._companions.described_by(), *self._checkpoint.weight_files())
            self._digests = {file.name: _sha256(file) for file in files}
        return dict(self._digests)

    def num_weights(self) -> int:
        """How many numbers the stored tensors hold."""
        return sum(math.prod(self._checkpoint.shape(name)) for name in self._checkpoint.names())

    def file_bytes(self) -> int:
        """The size of the weight files together, in bytes."""
        return sum(file.stat().st_size for file in self._checkpoint.weight_files() if file.suffix != ".json")

    def mapped(self) -> bool:
        """Whether weights are read through a memory map, whose pages count as the process's memory."""
        return any(file.suffix == ".gguf" for file in self._checkpoint.weight_files())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
