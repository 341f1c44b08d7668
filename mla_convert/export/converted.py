"""A converted folder, read lazily: what an export starts from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mla_convert.errors import FormatError, SourceError
from mla_convert.mla import MLAConfig, MLAForCausalLM, MLAWeights
from mla_convert.mla.names import NORMED_TABLE, TABLE, from_hf
from mla_convert.sources import Part
from mla_convert.sources.checkpoint import check_finite, main_dtype
from mla_convert.sources.companions import FolderCompanions, save_tokenizer
from mla_convert.sources.safetensors_reader import open_safetensors
from mla_convert.spec import BlockSpec, MLAShape, QKNormSpec, RopeSpec, RopeUpdate, SourceSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ATTENTION = ".self_attn."


class ConvertedModel:
    """A folder of the native format; made by :func:`open_converted`. No weight is read before it is asked for.

    It offers what the writers of formats ask of a source (`spec`, `config`, `copied`, `tensor`, `save_companions`), and
    its layers as :class:`~mla_convert.mla.MLAWeights`.

    Attributes:
        folder: where it lies.
        config: of the native class.
    """

    def __init__(self, folder: Path, config: MLAConfig) -> None:
        self.folder = folder
        self.config = config
        self._checkpoint = open_safetensors(folder)
        self._companions = FolderCompanions(folder)

    @property
    def spec(self) -> SourceSpec:
        """The model as a source of other formats: as many KV heads as query heads, each of N dims.

        ``rope`` is that of layer 0; layers may turn at frequencies of their own (see :meth:`layer`). What queries' and
        keys' norms are taken of are not these heads: :attr:`shapes` says how many numbers of keys' norms are cached.
        """
        return self._spec

    @cached_property
    def _spec(self) -> SourceSpec:
        c = self.config
        windows = [c.sliding_window if kind == "sliding_attention" else None for kind in c.layer_types or ()]
        return SourceSpec(
            architecture="MLAForCausalLM",
            family="mla_convert",
            num_layers=c.num_hidden_layers,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            vocab_size=c.vocab_size,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_attention_heads,
            head_dim=c.qk_nope_head_dim,
            rope=RopeSpec(
                dim=c.rope_dim_of(0),
                inv_freq=self.frequencies[0],
                attention_scaling=c.rope_attention_scaling,
                update=_rope_update(c),
            ),
            attention_scale=c.attention_scale,
            rms_norm_eps=c.rms_norm_eps,
            hidden_act=c.hidden_act,
            max_position_embeddings=c.max_position_embeddings,
            query_bias=c.query_bias,
            key_bias=c.latent_bias,
            value_bias=c.latent_bias,
            output_bias=c.output_bias,
            mlp_bias=c.mlp_bias,
            tie_word_embeddings=c.tie_word_embeddings,
            windows=tuple(windows) or (None,) * c.num_hidden_layers,
            dtype=main_dtype(self._checkpoint),
            block=_block(c),
            attention_softcap=c.attention_softcap,
            alibi_slopes=None if c.alibi_slopes is None else tuple(c.alibi_slopes),
            alibi_rounded=c.alibi_rounded,
            qk_norm=None if c.qk_norm is None else QKNormSpec("all" if c.qk_norm == "all" else "head", c.qk_norm_eps),
        )

    @property
    def shapes(self) -> tuple[MLAShape, ...]:
        """C, R, N, V and the number of key scales of each layer."""
        c = self.config
        return tuple(
            MLAShape(c.kv_rank_of(i), c.rope_dim_of(i), c.qk_nope_head_dim, c.v_head_dim, c.key_scales)
            for i in range(c.num_hidden_layers)
        )

    @property
    def frequencies(self) -> tuple[tuple[float, ...], ...]:
        """Per layer the angular frequencies of its R/2 slots, radians a position."""
        return tuple(tuple(row) for row in self.config.rope_inv_freq or ())

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every stored tensor; no weight is read."""
        return {name: tuple(self._checkpoint.shape(name)) for name in self._checkpoint.names()}

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, with its chat template.

        Raises:
            SourceError: there is none that can be loaded.
        """
        return self._companions.load_tokenizer()

    def layer(self, index: int) -> MLAWeights:
        """The attention of layer ``index``, read now, in the dtype it is stored in.

        Raises:
            SourceError: a weight is missing or cannot be read.
        """
        prefix = f"model.layers.{index}{_ATTENTION}"
        names = set(self._checkpoint.names())
        c = self.config
        table = TABLE if c.qk_norm is None else NORMED_TABLE
        tensors = {name: self.tensor(prefix + name) for name in table if prefix + name in names}
        query_norms = {None: 0, "all": 1, "head": c.num_attention_heads}[c.qk_norm]
        try:
            return from_hf(
                tensors,
                self.shapes[index],
                c.num_attention_heads,
                inv_freq=self.frequencies[index],
                query_norms=query_norms,
                pairs=None if c.rope_pairs is None else tuple(c.rope_pairs[index]),
            )
        except (KeyError, ValueError, RuntimeError) as error:
            raise SourceError(
                f"the attention of layer {index} in {self.folder} is not what config.json says: {error}",
                "convert the model again",
            ) from error

    def copied(self, layer: int | None) -> Iterator[tuple[str, Part]]:
        """Pairs (stored name, all of it, so named) of what is not attention, of ``layer``, for None outside layers."""
        prefix = None if layer is None else f"model.layers.{layer}."
        for name in self._checkpoint.names():
            inside = name.startswith("model.layers.")
            if (not inside if prefix is None else name.startswith(prefix)) and _ATTENTION not in name:
                yield name, Part(name)

    def tensor(self, name: str) -> Tensor:
        """One stored tensor, read now.

        Raises:
            SourceError: there is no such tensor, it cannot be read, or a number of it is not finite.
        """
        tensor = self._checkpoint.read(name)
        check_finite(name, tensor, self.folder)
        return tensor

    def save_companions(self, folder: Path) -> None:
        """Write tokenizer, chat template, generation config and licence files into ``folder``.

        Raises:
            SourceError: there is no tokenizer that can be loaded.
        """
        save_tokenizer(self.load_tokenizer(), folder)
        self._companions.save_others(self.config, folder)


def _block(config: MLAConfig) -> BlockSpec:
    named: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(BlockSpec)}
    named["expert_layers"] = None if config.expert_layers is None else tuple(config.expert_layers)
    return BlockSpec(**named)


def _rope_update(config: MLAConfig) -> RopeUpdate | None:
    if config.rope_update is None:
        return None
    named: dict[str, Any] = {field.name: config.rope_update[field.name] for field in fields(RopeUpdate)}
    named["inv_freq"] = tuple(named["inv_freq"])
    return RopeUpdate(**named)


def open_converted(folder: Path) -> ConvertedModel:
    """Open a folder that convert or heal wrote in the native format; reads its config and tensor headers only.

    Raises:
        SourceError: there is no such folder, its config is not readable, a weight file is missing or damaged, or its
            tensors are not those that the config asks for.
        FormatError: it holds a model of another format.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise SourceError(f"{folder} has no config.json", "name a folder that `mla-convert convert` wrote")
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        model_type = stated.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise SourceError(f"{path} is not a JSON object: {error}", "convert the model again") from error
    if model_type != MLAConfig.model_type:
        raise FormatError(
            f"{folder} holds a {model_type!r} model; what is exported is a model of the native format",
            "convert the source with --format native, and export what that writes",
        )
    try:
        config = MLAConfig.from_dict(stated)
        with torch.device("meta"):
            asked_for = MLAForCausalLM(config).state_dict()
    except Exception as error:  # transformers' config validation raises errors of no common kind
        said = " ".join(str(error).split())
        raise SourceError(f"{path} is not a config of the native format: {said}", "convert the model again") from error
    model = ConvertedModel(folder, config)
    _check_tensors(model, {name: tuple(tensor.shape) for name, tensor in asked_for.items()})
    return model


def _check_tensors(model: ConvertedModel, expected: dict[str, tuple[int, ...]]) -> None:
    """Raise where a tensor lacks, is left over or has another shape: writers would carry that over without a word."""
    if model.config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    found = model.tensor_shapes()
    wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if wrong:
        name = wrong[0]
        raise SourceError(
            f"the weights in {model.folder} are not those that config.json asks for: '{name}' is "
            f"{_shown(found.get(name))}, expected {_shown(expected.get(name))}; {len(wrong)} in all differ",
            "convert the model again",
        )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
