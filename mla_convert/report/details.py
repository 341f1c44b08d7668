"""What a conversion knows of its layers that neither conversion.json nor the weights say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mla_convert.spec import SourceSpec

# A spectrum has 2·G·K entries; a curve on a screen needs no more points than this.
SPECTRUM_POINTS = 64


@dataclass(frozen=True)
class LayerDetails:
    """One layer's spectrum and RoPE slots; what is not known is empty.

    Attributes:
        ranks: latent ranks c, ascending from 0 to J = 2·G·K; the layer's own C is among them.
        lost: the share of the content's energy, in the metric of the factorisation, outside the first c directions.
        slots: how many RoPE slots each pair of a source head has.
    """

    ranks: tuple[int, ...]
    lost: tuple[float, ...]
    slots: tuple[int, ...]

    @classmethod
    def of(
        cls, spectrum: Sequence[float], kv_rank: int, pairs: Sequence[int] | None, *, num_pairs: int
    ) -> LayerDetails:
        """Return a layer's details.

        Args:
            spectrum: all J eigenvalues of the weighted moment, descending; see ``JointFactors``.
            kv_rank: the layer's C.
            pairs: the pair that each slot turns with; None where that is not known.
            num_pairs: pairs of a source head that turn.
        """
        tails = [*accumulate(reversed(spectrum), initial=0.0)]
        total, size = tails[-1], len(spectrum)
        # Denser where a spectrum falls most, at its beginning.
        ranks = {round(size * (i / (SPECTRUM_POINTS - 1)) ** 1.5) for i in range(SPECTRUM_POINTS)}
        ranks.add(min(kv_rank, size))
        lost = {rank: _rounded(tails[size - rank] / total) if total > 0 else 0.0 for rank in sorted(ranks)}
        slots = () if pairs is None else tuple(list(pairs).count(pair) for pair in range(num_pairs))
        return cls(tuple(lost), tuple(lost.values()), slots)


@dataclass(frozen=True)
class ReportDetails:
    """What a conversion leaves for its report.

    Attributes:
        layers: of every layer.
        frequencies: radians a position, of the source's pairs that turn: of every layer, or a single row where all
            layers have the same.
    """

    layers: tuple[LayerDetails, ...]
    frequencies: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, layers: Sequence[LayerDetails], spec: SourceSpec) -> ReportDetails:
        """Return the details of layers that were converted from a source."""
        ropes = [spec.rope_of(i) for i in range(spec.num_layers)]
        rows = [rope.inv_freq[: rope.dim // 2] for rope in ropes]
        return cls(tuple(layers), tuple(rows[:1] if len(set(rows)) == 1 else rows))

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> ReportDetails:
        """Return the details that ``dataclasses.asdict`` and JSON made `stored` of.

        Raises:
            KeyError, TypeError: it is not of these.
        """
        layers = (
            LayerDetails(tuple(one["ranks"]), tuple(one["lost"]), tuple(one["slots"])) for one in stored["layers"]
        )
        return cls(tuple(layers), tuple(tuple(row) for row in stored["frequencies"]))


def _rounded(share: float) -> float:
    """Four significant digits, which is more than a curve shows."""
    return float(f"{share:.4g}")
