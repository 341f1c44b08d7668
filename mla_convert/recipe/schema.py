"""What a recipe's YAML may hold: the one place that says what each key means, and what values it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

# No number in a recipe means anything beyond it, and tensors of more elements cannot be addressed.
_LARGEST = 10**12


class Section(BaseModel):
    """A mapping of known keys; another key is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CalibrationSection(Section):
    """What calibration reads."""

    tokens: int = Field(ge=1, le=_LARGEST, description="How many tokens are read.")
    context: int = Field(ge=2, le=_LARGEST, description="How many of them make a context.")


class DecoupleSection(Section):
    """Which key components keep RoPE, and what stands for the rotation of the others."""

    mixing: Literal["complex", "real"] = Field(
        default="complex",
        description="Maps over the key heads of a frequency: complex, all that commute with RoPE; real.",
    )
    slots: Literal["cost", "one_per_pair", "all"] = Field(
        default="cost",
        description="Which components get a RoPE slot: cost, the costliest of the layer; one_per_pair, at most one a "
        "frequency; all, and nothing is lost.",
    )
    constants: Literal["fisher", "attention", "one"] = Field(
        default="fisher",
        description="What replaces a rotation: fisher, the least change of the loss's gradient; attention, the mean "
        "rotation under the attention weights; one, nothing.",
    )
    rope_share: float | None = Field(
        default=0.25, ge=0, le=1, description="R as a share of C + R; null takes one slot for every frequency."
    )
    damping: float = Field(
        default=0.01, ge=0, description="Of the metric that ranks components, as a share of its mean eigenvalue."
    )


class FactoriseSection(Section):
    """The joint factorisation of content keys and values."""

    moment: Literal["attended", "plain", "weights"] = Field(
        default="attended",
        description="Tokens weighted by the squared attention that they receive: attended; alike: plain; no tokens, "
        "but the projections' own Gram matrix: weights.",
    )
    metric: Literal["fisher", "attention_output", "mixed", "balanced", "identity"] = Field(
        default="mixed",
        description="What errors count by: fisher, the loss's gradients; attention_output, queries and W_O; mixed, the "
        "mean of both; balanced, one factor for all keys and one for all values; identity.",
    )
    damping: float | tuple[float, ...] = Field(
        default=0.01,
        description="Of the metric, as a share of its mean eigenvalue; of a list each layer takes the one with the "
        "least error on contexts that calibration holds out.",
    )
    prior: float = Field(
        default=0.0,
        ge=0,
        description="How much of the weights' own Gram matrix is added to the moment, as a share of its trace: for "
        "directions that the text never used.",
    )
    noise: float = Field(
        default=0.0,
        ge=0,
        description="Weight of contexts of uniformly drawn tokens against the text's, for the same end; 0 runs none.",
    )

    @field_validator("damping", mode="plain")
    @classmethod
    def _one_or_several(cls, value: Any) -> float | tuple[float, ...]:
        candidates = value if isinstance(value, list) else [value]
        if not candidates or not all(type(number) in (int, float) and 0 <= number <= _LARGEST for number in candidates):
            raise ValueError("not a number of at least 0, nor a list of such numbers")
        numbers = tuple(float(number) for number in candidates)
        return numbers if isinstance(value, list) else numbers[0]


class AllocationSection(Section):
    """How a budget of C + R numbers becomes the sizes of layers."""

    split: Literal["share", "predicted"] = Field(
        default="share",
        description="C against R in a layer: share, by decouple.rope_share; predicted, by least predicted loss.",
    )
    layers: Literal["uniform", "waterfill"] = Field(
        default="uniform",
        description="C + R of layers: uniform, alike; waterfill, the model's sum where it does most good.",
    )
    step: int = Field(default=8, ge=2, multiple_of=2, le=_LARGEST, description="What sizes differ by, even.")
    moved_weight: float = Field(
        default=0.5, ge=0, description="Weight of the cost of lost rotations against that of truncation."
    )
    spread: int = Field(
        default=64, ge=0, le=_LARGEST, description="What waterfill gives a layer above the budget at most."
    )


class RefitSection(Section):
    """Refits in closed form to what the converted layers before make of the text."""

    tokens: int = Field(
        default=16384, ge=1, le=_LARGEST, description="How much of the calibration text both models are run over."
    )
    inputs: float = Field(
        default=0.0,
        ge=0,
        description="Ridge of the refit of keys and values to the converted model's inputs, as a share of their mean "
        "energy; 0 leaves it out.",
    )
    outputs: float = Field(
        default=0.0, ge=0, description="Ridge of the refit of W_O to the converted model's heads, likewise."
    )


class HealLayersSection(Section):
    """Stage `layers`: each layer's attention against the source's, one after the other."""

    tokens: int = Field(default=65536, ge=1, le=10**9, description="Training tokens; their hidden states are kept.")
    steps: int = Field(default=200, ge=1, le=_LARGEST, description="Optimiser steps a layer.")
    batch: int = Field(default=4, ge=1, le=_LARGEST, description="Contexts a step.")
    learning_rate: float = Field(default=3e-3, gt=0, lt=1, description="At the cosine's top.")


class HealGlobalSection(Section):
    """Stage `global`: the whole model against the source's predictions."""

    tokens: int = Field(default=131072, ge=1, le=_LARGEST, description="Training tokens.")
    passes: int = Field(default=1, ge=1, le=_LARGEST, description="How often a context may be trained on.")
    batch: int = Field(default=4, ge=1, le=_LARGEST, description="Contexts a step.")
    learning_rate: float = Field(default=5e-4, gt=0, lt=1, description="At the cosine's top.")


class HealSection(Section):
    """Training after the conversion, on its calibration texts."""

    context: int = Field(default=512, ge=2, le=_LARGEST, description="Tokens in a context.")
    layers: HealLayersSection | None = Field(default=None, description="The stage; left out, it is not run.")
    whole: HealGlobalSection | None = Field(default=None, alias="global", description="Likewise.")  # a Python keyword

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.layers is None and self.whole is None:
            raise ValueError("neither layers nor global: leave heal out")
        if self.whole is not None and self.whole.tokens < self.whole.batch * self.context:
            raise ValueError("global.tokens do not fill one batch of contexts")
        return self


class RecipeSection(Section):
    """A whole recipe."""

    name: str = Field(description="What the recipe is called.")
    description: str = Field(description="What it does, for people.")
    calibration: CalibrationSection | None = Field(default=None, description="What calibration reads.")
    decouple: DecoupleSection = Field(description="Which key components keep RoPE.")
    factorise: FactoriseSection = Field(description="How content keys and values share the latent.")
    allocation: AllocationSection | None = Field(default=None, description="Sizes chosen by predicted loss.")
    refit: RefitSection | None = Field(default=None, description="Weights fitted again, in closed form.")
    heal: HealSection | None = Field(default=None, description="Training after the conversion.")


def fields_at(path: Sequence[str | int]) -> dict[str, FieldInfo]:
    """Return the keys that a section may have, as YAML spells them; none where the path is no section's."""
    section: type[Section] = RecipeSection
    for key in path:
        found = _fields(section).get(str(key))
        below = _section(found) if found is not None else None
        if below is None:
            return {}
        section = below
    return _fields(section)


def known_keys(path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key that holds a value, sections in order."""
    for key, field in fields_at(path).items():
        if _section(field) is None:
            yield (*path, key)
        else:
            yield from known_keys((*path, key))


def _fields(section: type[Section]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _section(field: FieldInfo) -> type[Section] | None:
    """The section that a key holds, if it holds one."""
    candidates = (field.annotation, *get_args(field.annotation))
    return next((found for found in candidates if isinstance(found, type) and issubclass(found, Section)), None)
