"""What a conversion does at each step, as frozen values; `mla_convert.recipe.schema` says what each of them means."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class CalibrationRecipe:
    """How much text is read: `tokens` in contexts of `context` tokens."""

    tokens: int
    context: int


@dataclass(frozen=True)
class DecoupleRecipe:
    """Which key components keep RoPE, and what stands for the rotation of the others."""

    mixing: Literal["complex", "real"]
    slots: Literal["cost", "one_per_pair", "all"]
    constants: Literal["fisher", "attention", "one"]
    rope_share: float | None
    damping: float


@dataclass(frozen=True)
class FactoriseRecipe:
    """The joint factorisation of content keys and values."""

    moment: Literal["attended", "plain", "weights"]
    metric: Literal["fisher", "attention_output", "mixed", "balanced", "identity"]
    damping: float | tuple[float, ...]
    prior: float
    noise: float

    @property
    def dampings(self) -> tuple[float, ...]:
        """The candidates, in the recipe's order; one where a number is given."""
        return self.damping if isinstance(self.damping, tuple) else (self.damping,)


@dataclass(frozen=True)
class AllocationRecipe:
    """How a budget of C + R numbers becomes the sizes of layers; see `mla_convert.allocate`."""

    split: Literal["share", "predicted"]
    layers: Literal["uniform", "waterfill"]
    step: int
    moved_weight: float
    spread: int


@dataclass(frozen=True)
class RefitRecipe:
    """Refits in closed form to what the converted layers before make of the text; see `mla_convert.refit`."""

    tokens: int
    inputs: float
    outputs: float


@dataclass(frozen=True)
class HealLayersRecipe:
    """Stage ``layers`` of healing; see `mla_convert.heal.layers.LayerSettings`. Contexts are drawn of `tokens`."""

    tokens: int
    steps: int
    batch: int
    learning_rate: float


@dataclass(frozen=True)
class HealGlobalRecipe:
    """Stage ``global`` of healing; see `mla_convert.heal.distil_settings.DistilSettings`. A batch is of contexts."""

    tokens: int
    passes: int
    batch: int
    learning_rate: float


@dataclass(frozen=True)
class HealRecipe:
    """Training after the conversion, on its calibration texts, in contexts of `context` tokens.

    Attributes:
        layers, whole: the stages ``layers`` and ``global``; None leaves one out.
    """

    context: int
    layers: HealLayersRecipe | None
    whole: HealGlobalRecipe | None


@dataclass(frozen=True)
class Recipe:
    """A named conversion method."""

    name: str
    description: str
    calibration: CalibrationRecipe | None
    decouple: DecoupleRecipe
    factorise: FactoriseRecipe
    allocation: AllocationRecipe | None = None
    refit: RefitRecipe | None = None
    heal: HealRecipe | None = None

    @property
    def refits(self) -> bool:
        """Whether any weight is refitted after calibration."""
        return self.refit is not None and (self.refit.inputs > 0 or self.refit.outputs > 0)

    @property
    def allocates(self) -> bool:
        """Whether sizes are chosen after calibration."""
        allocation = self.allocation
        return allocation is not None and (allocation.split == "predicted" or allocation.layers == "waterfill")

    @property
    def needs_gradients(self) -> bool:
        """Whether calibration makes a backward pass."""
        return (
            self.decouple.constants == "fisher" or self.factorise.metric in ("fisher", "mixed") or self.needs_held_out
        )

    @property
    def needs_held_out(self) -> bool:
        """Whether calibration sets contexts aside, to choose among several dampings."""
        return len(self.factorise.dampings) > 1

    def to_dict(self) -> dict[str, Any]:
        """The recipe as it would stand in YAML: without the sections for what it does not do."""
        found = asdict(self)
        if isinstance(self.factorise.damping, tuple):
            found["factorise"]["damping"] = list(self.factorise.damping)
        if self.heal is not None:
            found["heal"]["global"] = found["heal"].pop("whole")
            found["heal"] = {name: value for name, value in found["heal"].items() if value is not None}
        optional = ("allocation", "refit", "heal")
        return {name: value for name, value in found.items() if name not in optional or value is not None}
