"""Calibration statistics: sums that merge, moments read from them, and the file they are kept in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, overload

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from mla_convert.calibrate.statistics_file import StatisticsFile, read_made_from, write_statistics_file
from mla_convert.errors import StatisticsError
from mla_convert.spec import SourceSpec


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
        if not (gradients or held_out):
            return
        first = self.layers[0]
        if gradients and first.gradients is None:
            raise StatisticsError(
                "the recipe needs loss gradients, which these statistics do not hold",
                "calibrate with this recipe, or choose one with a forward-only metric",
            )
        if held_out and first.held_out is None:
            raise nothing_held_out()


class _LazyLayers(Sequence[LayerStatistics]):
    """So many layers, each read when it is asked for."""

    def __init__(self, count: int) -> None:
        self._count = count

    @abstractmethod
    def _read(self, layer: int) -> LayerStatistics: ...

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> LayerStatistics: ...

    @overload
    def __getitem__(self, index: slice) -> list[LayerStatistics]: ...

    def __getitem__(self, index: int | slice) -> LayerStatistics | list[LayerStatistics]:
        if isinstance(index, slice):
            return [self[i] for i in range(self._count)[index]]
        return self._read(range(self._count)[index])


class StoredLayers(_LazyLayers):
    """The statistics of layers that lie in a folder, a file each; one is read when it is asked for.

    Args:
        provenance: what the files must be of; others count as absent.
    """

    def __init__(self, folder: Path, count: int, provenance: Provenance) -> None:
        super().__init__(count)
        self._folder = folder
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

    def _read(self, layer: int) -> LayerStatistics:
        return load_statistics(self.path(layer)).layers[0]


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
    """Write statistics as one safetensors file, which appears whole or not at all; one layer is held at a time.

    Raises:
        StatisticsError: the file cannot be written, or a layer that lies in another file cannot be read.
    """
    layers = statistics.layers
    write_statistics_file(path, asdict(statistics.provenance), len(layers), lambda i: _values(layers[i]))


def read_provenance(path: Path) -> Provenance:
    """Read where the statistics of a file come from, and no more of it.

    Raises:
        StatisticsError: the file is damaged, or of another version.
    """
    try:
        return Provenance(**read_made_from(path))
    except TypeError as error:
        raise StatisticsError(f"{path} cannot be read as statistics: {error}", "calibrate again") from error


def load_statistics(path: Path) -> Statistics:
    """Open what :func:`save_statistics` wrote; a layer is read when it is asked for, each time anew.

    Raises:
        StatisticsError: the file is absent, damaged, cut short, of another version or not complete; also later, from a
            layer, where the file was changed since.
    """
    file = StatisticsFile(path)
    try:
        for layer, names in enumerate(file.names):
            _check_names(layer, names, file.names[0])
        return Statistics(_FileLayers(file), Provenance(**file.provenance))
    except (TypeError, ValueError) as error:
        raise StatisticsError(
            f"{path} cannot be read as statistics: {error}", "calibrate again with --save-statistics"
        ) from error


class _FileLayers(_LazyLayers):
    """The layers of one file."""

    def __init__(self, file: StatisticsFile) -> None:
        super().__init__(len(file.names))
        self._file = file

    def _read(self, layer: int) -> LayerStatistics:
        return _layer(self._file.read(layer))


def _check_names(layer: int, names: Set[str], first: Set[str]) -> None:
    """Check that a layer has every sum and number of the parts that it has, and the first layer's parts.

    Raises:
        ValueError: it has not.
    """
    expected = _names(LayerStatistics)
    for part, kind in _NESTED.items():
        if any(name.startswith(f"{part}.") for name in names):
            expected |= {f"{part}.{name}" for name in _names(kind)}
    if missing := expected - names:
        raise ValueError(f"layer {layer} lacks {min(missing)}")
    if unknown := names - expected:
        raise ValueError(f"layer {layer} holds {min(unknown)}, which is no part of statistics")
    if unlike := names ^ first:
        raise ValueError(f"only one of the layers 0 and {layer} holds {min(unlike)}")


def _names(kind: Any) -> set[str]:
    """The fields of a dataclass, without those that are nested."""
    return {f.name for f in fields(kind) if f.name not in _NESTED}


def _values(layer: LayerStatistics) -> dict[str, Any]:
    """Every sum and number of a layer, those of its parts under the part's name and a dot; none of a part of None."""
    values = _named(layer)
    for part in _NESTED:
        values |= {f"{part}.{name}": value for name, value in _named(getattr(layer, part)).items()}
    return values


def _named(part: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, without those that are nested; none of None."""
    return {} if part is None else {f.name: getattr(part, f.name) for f in fields(part) if f.name not in _NESTED}


def _layer(values: Mapping[str, Any]) -> LayerStatistics:
    found: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    for part, kind in _NESTED.items():
        nested = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{part}.")}
        found[part] = kind(**nested) if nested else None
    return LayerStatistics(**found)
