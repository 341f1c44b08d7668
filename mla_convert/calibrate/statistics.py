"""Calibration statistics: sums that merge, moments read from them, and the file they are kept in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Complex, Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mla_convert.errors import StatisticsError
from mla_convert.spec import SourceSpec

FORMAT_VERSION = 1


@dataclass(frozen=True)
class LayerStatistics:
    """Sums over calibration tokens for one layer; float64 or complex128. J = 2·G·K, keys before RoPE over values.

    Every field but `constants` is a plain sum, so statistics of disjoint token sets merge by addition.

    Attributes:
        tokens: tokens behind the key/value and query sums.
        key_value: Σ y y^T, y the stacked keys and values of a token.
        attended: Σ w y y^T, w = Σ_heads Σ_queries p², the squared attention that the token receives.
        attended_weight: Σ w.
        query: Σ q q^T for each head, queries before RoPE.
        rotation: Σ |a_t|² p_ts e^{i·theta·(s-t)} for each query head and pair.
        query_energy: Σ |a_t|² for each query head and pair.
        pair_tokens, pair_gradients: tokens behind, and Σ u u^H for each pair, u = (γ_1..γ_G, g_1..g_H): the loss's
            gradients at keys before RoPE, and at keys that a query head would score without rotation.
        constants: rho that the content gradients were taken with, [H F].
        content_tokens, content_gradients: tokens behind, and Σ g g^T, g the loss's gradient at content keys and values.
    """

    tokens: int
    key_value: Float[Tensor, "J J"]
    attended: Float[Tensor, "J J"]
    attended_weight: float
    query: Float[Tensor, "H K K"]
    rotation: Complex[Tensor, "H F"]
    query_energy: Float[Tensor, "H F"]
    pair_tokens: int = 0
    pair_gradients: Complex[Tensor, "F GH GH"] | None = None
    constants: Complex[Tensor, "H F"] | None = None
    content_tokens: int = 0
    content_gradients: Float[Tensor, "J J"] | None = None

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass was made."""
        return self.content_gradients is not None


@dataclass(frozen=True)
class Provenance:
    """What statistics were made from; two sets belong to the same conversion only if these agree."""

    source_digests: Mapping[str, str]
    text_ref: str
    text_digest: str
    tokens: int
    context: int
    seed: int
    gradients: bool


@dataclass(frozen=True)
class Statistics:
    """The statistics of every layer, and where they come from."""

    layers: tuple[LayerStatistics, ...]
    provenance: Provenance

    def check(self, digests: Mapping[str, str], spec: SourceSpec, *, gradients: bool) -> None:
        """Check that these statistics are of this source and hold what a recipe needs.

        Raises:
            StatisticsError: they are not, or do not.
        """
        if dict(self.provenance.source_digests) != dict(digests) or len(self.layers) != spec.num_layers:
            raise StatisticsError(
                "the statistics were made from another source", "calibrate on this source: leave --statistics out"
            )
        if gradients and not self.layers[0].has_gradients:
            raise StatisticsError(
                "the recipe needs loss gradients, which these statistics do not hold",
                "calibrate with this recipe, or choose one with a forward-only metric",
            )


def merge(first: LayerStatistics, second: LayerStatistics) -> LayerStatistics:
    """Return the statistics of both token sets together.

    Raises:
        ValueError: one has gradients and the other has none, or their content gradients used different constants.
    """
    same = (first.constants is None) == (second.constants is None)
    if not same or (first.constants is not None and not torch.equal(first.constants, second.constants)):
        raise ValueError("content gradients taken with different constants do not add up")
    summed = {
        f.name: getattr(first, f.name) + getattr(second, f.name)
        for f in fields(LayerStatistics)
        if f.name != "constants" and getattr(first, f.name) is not None
    }
    return replace(first, **summed)


def save_statistics(statistics: Statistics, path: Path) -> None:
    """Write statistics as one safetensors file, which appears whole or not at all.

    Raises:
        StatisticsError: the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    counts: list[dict[str, Any]] = []
    for i, layer in enumerate(statistics.layers):
        numbers = {}
        for f in fields(layer):
            value = getattr(layer, f.name)
            if isinstance(value, Tensor):
                plain = torch.view_as_real(value) if value.is_complex() else value
                tensors[f"layers.{i}.{f.name}"] = plain.contiguous()
            elif value is not None:
                numbers[f.name] = value
        counts.append(numbers)
    metadata = {
        "version": str(FORMAT_VERSION),
        "provenance": json.dumps(asdict(statistics.provenance), sort_keys=True),
        "counts": json.dumps(counts),
    }
    temporary = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata=metadata)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise StatisticsError(f"the statistics cannot be written to {path}: {error}", "free space there") from error


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
            for name in file.keys():
                _, layer, key = name.split(".")
                layers[int(layer)][key] = file.get_tensor(name)
            provenance = Provenance(**json.loads(metadata["provenance"]))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise StatisticsError(f"{path} cannot be read as statistics: {error}", remedy) from error
    complex_fields = ("rotation", "pair_gradients", "constants")
    for layer in layers:
        layer |= {key: torch.view_as_complex(layer[key]) for key in complex_fields if key in layer}
    return Statistics(tuple(LayerStatistics(**layer) for layer in layers), provenance)
