"""Calibration statistics: sums that merge, moments read from them, and the file they are kept in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, overload

import torch
from jaxtyping import Complex, Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mla_convert.errors import StatisticsError
from mla_convert.spec import SourceSpec

# Parts that came later are optional, so that older files can still be read.
FORMAT_VERSION = 1


@dataclass(frozen=True)
class GradientStatistics:
    """Sums of the loss's gradients in one layer.

    Attributes:
        pair_tokens, pairs: tokens behind, and Σ u u^H for each pair, u = (γ_1..γ_G, g_1..g_H): the gradients at keys
            before RoPE, and at keys that a query head would score without rotation.
        constants: rho, which replaces rotations where the content gradients were taken.
        content_tokens, content: tokens behind, and Σ g g^T, g the gradient at content keys and values.
    """

    pair_tokens: int
    pairs: Complex[Tensor, "F GH GH"]
    constants: Complex[Tensor, "H F"]
    content_tokens: int
    content: Float[Tensor, "J J"]

    @property
    def pair_moment(self) -> Complex[Tensor, "F GH GH"]:
        """E[u u^H]."""
        return self.pairs / self.pair_tokens

    @property
    def content_moment(self) -> Float[Tensor, "J J"]:
        """E[g g^T]: the Fisher information of content keys and values."""
        return self.content / self.content_tokens


@dataclass(frozen=True)
class HeldOutStatistics:
    """Sums over contexts that count nowhere else: what a choice made on the others is judged by.

    Attributes:
        attended, attended_weight: as in :class:`LayerStatistics`.
        content_tokens, content: as in :class:`GradientStatistics`, under the same constants.
    """

    attended: Float[Tensor, "J J"]
    attended_weight: float
    content_tokens: int
    content: Float[Tensor, "J J"]

    @property
    def attended_moment(self) -> Float[Tensor, "J J"]:
        """E[y y^T] with tokens weighted by the squared attention they receive."""
        return self.attended / self.attended_weight

    @property
    def content_moment(self) -> Float[Tensor, "J J"]:
        """E[g g^T]: the Fisher information of content keys and values."""
        return self.content / self.content_tokens


@dataclass(frozen=True)
class LayerStatistics:
    """Sums over calibration tokens for one layer; float64 or complex128. J = 2·G·K, keys before RoPE over values.

    Attributes:
        tokens: tokens seen.
        key_value: Σ y y^T, y the stacked keys and values of a token.
        attended: Σ w y y^T, w = Σ_heads Σ_queries p², the squared attention that the token receives.
        attended_weight: Σ w.
        query: Σ q q^T for each head, queries before RoPE.
        rotation: Σ |a_t|² p_ts e^{i·theta·(s-t)} for each query head and pair.
        query_energy: Σ |a_t|² for each query head and pair.
        noise_attended, noise_weight: `attended` and `attended_weight` over contexts of tokens drawn uniformly from the
            vocabulary, which reach directions that no one text does; they count nowhere else. Zero without any.
        gradients: from a backward pass, where one was made.
        held_out: from contexts set aside, where there are any.
    """

    tokens: int
    key_value: Float[Tensor, "J J"]
    attended: Float[Tensor, "J J"]
    attended_weight: float
    query: Float[Tensor, "H K K"]
    rotation: Complex[Tensor, "H F"]
    query_energy: Float[Tensor, "H F"]
    noise_attended: Float[Tensor, "J J"]
    noise_weight: float
    gradients: GradientStatistics | None = None
    held_out: HeldOutStatistics | None = None

    @property
    def plain_moment(self) -> Float[Tensor, "J J"]:
        """E[y y^T]."""
        return self.key_value / self.tokens

    def attended_moment(self, noise: float = 0.0) -> Float[Tensor, "J J"]:
        """E[y y^T] with tokens weighted by the squared attention they receive.

        `noise` is the weight of uniformly drawn tokens against the text's; without any in the statistics it is 0.
        """
        text = self.attended / self.attended_weight
        if noise == 0.0 or self.noise_weight == 0.0:
            return text
        return (text + noise * self.noise_attended / self.noise_weight) / (1.0 + noise)

    @property
    def mean_rotation(self) -> Complex[Tensor, "H F"]:
        """E[e^{i·theta·(s-t)}] under attention and query energy; 1 where a pair carries no energy."""
        energy = self.query_energy
        return torch.where(energy > 0, self.rotation / energy.clamp_min(torch.finfo(energy.dtype).tiny), 1.0)


_NESTED: Mapping[str, type] = {"gradients": GradientStatistics, "held_out": HeldOutStatistics}


@dataclass(frozen=True)
class Provenance:
    """What statistics were made from; two sets belong to the same conversion only if these agree.

    Attributes:
        held_out: whether contexts were set aside; `tokens` counts them too.
    """

    source_digests: Mapping[str, str]
    text_ref: str
    text_digest: str
    tokens: int
    context: int
    seed: int
    gradients: bool
    noise_tokens: int = 0
    held_out: bool = False


@dataclass(frozen=True)
class Statistics:
    """The statistics of every layer, and where they come from."""

    layers: Sequence[LayerStatistics]
    provenance: Provenance

    def check(self, digests: Mapping[str, str], spec: SourceSpec, *, gradients: bool, held_out: bool = False) -> None:
        """Check that these statistics are of this source and hold what a recipe needs.

        Raises:
            StatisticsError: they are not, or do not.
        """
        if dict(self.provenance.source_digests) != dict(digests) or len(self.layers) != spec.num_layers:
            raise StatisticsError(
                "the statistics were made from another source", "calibrate on this source: leave --statistics out"
            )
        if gradients and self.layers[0].gradients is None:
            raise StatisticsError(
                "the recipe needs loss gradients, which these statistics do not hold",
                "calibrate with this recipe, or choose one with a forward-only metric",
            )
        if held_out and self.layers[0].held_out is None:
            raise nothing_held_out()


class StoredLayers(Sequence[LayerStatistics]):
    """The statistics of layers that lie in a folder, a file each; one is read when it is asked for.

    Args:
        provenance: what the files must be of; others count as absent.
    """

    def __init__(self, folder: Path, count: int, provenance: Provenance) -> None:
        self._folder = folder
        self._count = count
        self._provenance = provenance

    def path(self, layer: int) -> Path:
        """The file of a layer."""
        return self._folder / f"statistics.{layer:05d}.safetensors"

    def has(self, layer: int) -> bool:
        """Whether a layer's file is there, whole and of this provenance."""
        try:
            return self.path(layer).is_file() and read_provenance(self.path(layer)) == self._provenance
        except StatisticsError:
            return False

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> LayerStatistics: ...

    @overload
    def __getitem__(self, index: slice) -> list[LayerStatistics]: ...

    def __getitem__(self, index: int | slice) -> LayerStatistics | list[LayerStatistics]:
        if isinstance(index, slice):
            return [self[i] for i in range(self._count)[index]]
        return load_statistics(self.path(range(self._count)[index])).layers[0]


def nothing_held_out() -> StatisticsError:
    """Return the error of a choice that these statistics cannot judge."""
    return StatisticsError(
        "the recipe chooses a damping by held-out error, and these statistics hold no contexts out",
        "calibrate with this recipe, or give factorise.damping one number",
    )


def merge(first: LayerStatistics, second: LayerStatistics) -> LayerStatistics:
    """Return the statistics of both token sets together: every field is a sum, but for the constants.

    Raises:
        ValueError: one has gradients or held-out contexts and the other has none, or their content gradients used
            different constants.
    """
    one, other = first.gradients, second.gradients
    if (one is None) != (other is None):
        raise ValueError("statistics with and without gradients do not add up")
    if (first.held_out is None) != (second.held_out is None):
        raise ValueError("statistics with and without held-out contexts do not add up")
    gradients = None
    if one is not None and other is not None:
        if not torch.equal(one.constants, other.constants):
            raise ValueError("content gradients taken with different constants do not add up")
        gradients = replace(_sum(one, other, "constants"), constants=one.constants)
    held_out = None if first.held_out is None else _sum(first.held_out, second.held_out)
    return replace(_sum(first, second, *_NESTED), gradients=gradients, held_out=held_out)


def _sum(first: Any, second: Any, *skip: str) -> Any:
    """The first, with every field but those of `skip` added to the second's."""
    names = [f.name for f in fields(first) if f.name not in skip]
    return replace(first, **{name: getattr(first, name) + getattr(second, name) for name in names})


def save_statistics(statistics: Statistics, path: Path) -> None:
    """Write statistics as one safetensors file, which appears whole or not at all.

    Raises:
        StatisticsError: the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    counts: list[dict[str, Any]] = []
    for i, layer in enumerate(statistics.layers):
        values = _named(layer)
        for part in _NESTED:
            values |= {f"{part}.{name}": value for name, value in _named(getattr(layer, part)).items()}
        counts.append({name: value for name, value in values.items() if not isinstance(value, Tensor)})
        for name, value in values.items():
            if isinstance(value, Tensor):
                plain = torch.view_as_real(value) if value.is_complex() else value
                tensors[f"{i}.{name}"] = plain.contiguous()
    metadata = {
        "version": str(FORMAT_VERSION),
        "provenance": json.dumps(asdict(statistics.provenance), sort_keys=True),
        "counts": json.dumps(counts),
    }
    temporary = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata=metadata)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StatisticsError(
            f"the statistics cannot be written to {path}: {error}", "free space there, or choose another place"
        ) from error


def is_statistics(path: Path) -> bool:
    """Whether the file is one that :func:`save_statistics` wrote, of any version."""
    try:
        with safe_open(path, framework="pt") as file:
            return "provenance" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def read_provenance(path: Path) -> Provenance:
    """Read where the statistics of a file come from, and no more of it.

    Raises:
        StatisticsError: the file is damaged, or of another version.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("version") != str(FORMAT_VERSION):
                raise StatisticsError(f"{path} does not hold statistics of this version", "calibrate again")
            return Provenance(**json.loads(metadata["provenance"]))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise StatisticsError(f"{path} cannot be read as statistics: {error}", "calibrate again") from error


def load_statistics(path: Path) -> Statistics:
    """Read what :func:`save_statistics` wrote.

    Raises:
        StatisticsError: the file is absent, damaged, or of another version.
    """
    remedy = "calibrate again with --save-statistics"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("version") != str(FORMAT_VERSION):
                raise StatisticsError(f"{path} does not hold statistics of this version", remedy)
            layers = [dict(numbers) for numbers in json.loads(metadata["counts"])]
            for name in file.keys():  # noqa: SIM118 - not a mapping
                layer, _, field_name = name.partition(".")
                value = file.get_tensor(name)
                is_complex = field_name in ("rotation", "gradients.pairs", "gradients.constants")
                layers[int(layer)][field_name] = torch.view_as_complex(value) if is_complex else value
            provenance = Provenance(**json.loads(metadata["provenance"]))
            return Statistics(tuple(_layer(values) for values in layers), provenance)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, IndexError) as error:
        raise StatisticsError(f"{path} cannot be read as statistics: {error}", remedy) from error


def _named(part: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, without those that are nested; none of None."""
    return {} if part is None else {f.name: getattr(part, f.name) for f in fields(part) if f.name not in _NESTED}


def _layer(values: Mapping[str, Any]) -> LayerStatistics:
    found: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    for part, kind in _NESTED.items():
        nested = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{part}.")}
        found[part] = kind(**nested) if nested else None
    return LayerStatistics(**found)
