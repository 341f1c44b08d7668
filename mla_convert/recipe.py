"""Recipes: which variant of each step a conversion takes. YAML at the edge, validated, into frozen dataclasses."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mla_convert.errors import RecipeError

_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class CalibrationRecipe:
    """How much text is read: `tokens` in contexts of `context` tokens."""

    tokens: int
    context: int


@dataclass(frozen=True)
class DecoupleRecipe:
    """Which key components keep RoPE, and what stands for the rotation of the others.

    Attributes:
        mixing: maps over the key heads of a pair: ``complex`` (all that commute with RoPE) or ``real``.
        slots: ``cost`` (the costliest components of the layer, any number for a pair), ``one_per_pair``, or ``all``.
        constants: what replaces a rotation: ``fisher`` (least change of the loss's gradient), ``attention`` (the mean
            rotation under the attention weights), or ``one`` (no replacement).
        rope_share: R as a share of C + R where a budget is given; ``None`` takes one slot for every pair.
        damping: of the metric that ranks components, as a share of its mean eigenvalue.
    """

    mixing: Literal["complex", "real"]
    slots: Literal["cost", "one_per_pair", "all"]
    constants: Literal["fisher", "attention", "one"]
    rope_share: float | None
    damping: float


@dataclass(frozen=True)
class FactoriseRecipe:
    """The joint factorisation of content keys and values.

    Attributes:
        moment: tokens weighted by the squared attention they receive (``attended``), alike (``plain``), or no
            tokens at all (``weights``: the projections' own Gram matrix).
        metric: ``fisher`` (second moment of the loss's gradients), ``attention_output`` (queries and W_O), ``mixed``
            (the mean of both at equal trace), ``balanced`` (one factor for all keys, one for all values), ``identity``.
        damping: of the metric, as a share of its mean eigenvalue; of several candidates each layer takes the one with
            the least error on contexts that calibration holds out.
        prior: how much of the weights' own Gram matrix is added to the moment, as a share of its trace: what white
            inputs would give, so that directions which the calibration text never used are not lost.
        noise: the weight, against the text's, of contexts of tokens drawn uniformly from the vocabulary, in the
            attended moment; for the same end. With 0 none are run.
    """

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
    """How a budget of C + R numbers becomes the sizes of layers; see `mla_convert.allocate`.

    Attributes:
        split: C against R in a layer: ``share`` (R by `DecoupleRecipe.rope_share` of the budget, alike in all layers)
            or ``predicted`` (least predicted loss).
        layers: ``uniform`` (C + R alike in all layers) or ``waterfill`` (the sum over layers, where it does most good).
        step: numbers by which sizes differ, even.
        moved_weight: weight of the cost of lost rotations against that of truncation. Half of the former is in the
            latter's unit: it is that of a complex number, of which a score reads the real part.
        spread: what ``waterfill`` gives a layer above the budget at most.
    """

    split: Literal["share", "predicted"]
    layers: Literal["uniform", "waterfill"]
    step: int
    moved_weight: float
    spread: int


@dataclass(frozen=True)
class RefitRecipe:
    """Refits in closed form to what the converted layers before make of the text; see `mla_convert.refit`.

    Attributes:
        tokens: how much of the calibration text both models are run over, at most.
        inputs: ridge of the refit of keys and values to the converted model's inputs; with 0 there is none.
        outputs: ridge of the refit of W_O to the converted model's heads; with 0 there is none. Both ridges pull
            towards what is there, as a share of the inputs' mean energy.
    """

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


# No number in a recipe means anything beyond it, and tensors of more elements cannot be addressed.
_LARGEST = 10**12


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Calibration(_Model):
    tokens: int = Field(ge=1, le=_LARGEST)
    context: int = Field(ge=2, le=_LARGEST)


class _Decouple(_Model):
    mixing: Literal["complex", "real"] = "complex"
    slots: Literal["cost", "one_per_pair", "all"] = "cost"
    constants: Literal["fisher", "attention", "one"] = "fisher"
    rope_share: float | None = Field(default=0.25, ge=0, le=1)
    damping: float = Field(default=0.01, ge=0)


class _Factorise(_Model):
    moment: Literal["attended", "plain", "weights"] = "attended"
    metric: Literal["fisher", "attention_output", "mixed", "balanced", "identity"] = "mixed"
    damping: float | tuple[float, ...] = 0.01
    prior: float = Field(default=0.0, ge=0)
    noise: float = Field(default=0.0, ge=0)

    @field_validator("damping", mode="plain")
    @classmethod
    def _one_or_several(cls, value: Any) -> float | tuple[float, ...]:
        candidates = value if isinstance(value, list) else [value]
        if not candidates or not all(type(number) in (int, float) and 0 <= number <= _LARGEST for number in candidates):
            raise ValueError("not a number of at least 0, nor a list of such numbers")
        numbers = tuple(float(number) for number in candidates)
        return numbers if isinstance(value, list) else numbers[0]


class _Allocation(_Model):
    split: Literal["share", "predicted"] = "share"
    layers: Literal["uniform", "waterfill"] = "uniform"
    step: int = Field(default=8, ge=2, multiple_of=2, le=_LARGEST)
    moved_weight: float = Field(default=0.5, ge=0)
    spread: int = Field(default=64, ge=0, le=_LARGEST)


class _Refit(_Model):
    tokens: int = Field(default=16384, ge=1, le=_LARGEST)
    inputs: float = Field(default=0.0, ge=0)
    outputs: float = Field(default=0.0, ge=0)


class _HealLayers(_Model):
    tokens: int = Field(default=65536, ge=1, le=10**9)  # their hidden states are kept
    steps: int = Field(default=200, ge=1, le=_LARGEST)
    batch: int = Field(default=4, ge=1, le=_LARGEST)
    learning_rate: float = Field(default=3e-3, gt=0, lt=1)


class _HealGlobal(_Model):
    tokens: int = Field(default=131072, ge=1, le=_LARGEST)
    passes: int = Field(default=1, ge=1, le=_LARGEST)
    batch: int = Field(default=4, ge=1, le=_LARGEST)
    learning_rate: float = Field(default=5e-4, gt=0, lt=1)


class _Heal(_Model):
    context: int = Field(default=512, ge=2, le=_LARGEST)
    layers: _HealLayers | None = None
    whole: _HealGlobal | None = Field(default=None, alias="global")  # a keyword of Python

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.layers is None and self.whole is None:
            raise ValueError("neither layers nor global: leave heal out")
        if self.whole is not None and self.whole.tokens < self.whole.batch * self.context:
            raise ValueError("global.tokens do not fill one batch of contexts")
        return self


class _Recipe(_Model):
    name: str
    description: str
    calibration: _Calibration | None = None
    decouple: _Decouple
    factorise: _Factorise
    allocation: _Allocation | None = None
    refit: _Refit | None = None
    heal: _Heal | None = None


def available_recipes() -> tuple[str, ...]:
    """The names of the recipes that come with the package."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Return the recipe of that name, or the one in that YAML file.

    Raises:
        RecipeError: there is none, or it does not validate.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = _folder() / f"{name_or_path}.yaml"
        if str(name_or_path) not in available_recipes():
            raise RecipeError(
                f"there is no recipe {str(name_or_path)!r}", f"one of {', '.join(available_recipes())}, or a .yaml file"
            )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        parsed = _Recipe.model_validate(content)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the recipe {path} cannot be read: {error}", "check the path") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"the recipe {path} is not YAML: {_fault(error)}", "mend the line that is named") from error
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'recipe'}: {e['msg']}" for e in error.errors())
        raise RecipeError(f"the recipe {path} does not validate: {faults}", "mend these keys") from error
    recipe = Recipe(
        name=parsed.name,
        description=parsed.description,
        calibration=CalibrationRecipe(**parsed.calibration.model_dump()) if parsed.calibration else None,
        decouple=DecoupleRecipe(**parsed.decouple.model_dump()),
        factorise=FactoriseRecipe(**parsed.factorise.model_dump()),
        allocation=AllocationRecipe(**parsed.allocation.model_dump()) if parsed.allocation else None,
        refit=RefitRecipe(**parsed.refit.model_dump()) if parsed.refit else None,
        heal=_heal(parsed.heal) if parsed.heal else None,
    )
    _check_allocation(recipe, path)
    if recipe.calibration is None and not _weights_suffice(recipe):
        raise RecipeError(
            f"the recipe {path} uses calibration text but has no calibration section",
            "add calibration: {tokens: ..., context: ...}",
        )
    return recipe


def _fault(error: Exception) -> str:
    """A parser's message in one line, with the line and column of the file."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _heal(parsed: _Heal) -> HealRecipe:
    return HealRecipe(
        context=parsed.context,
        layers=HealLayersRecipe(**parsed.layers.model_dump()) if parsed.layers else None,
        whole=HealGlobalRecipe(**parsed.whole.model_dump()) if parsed.whole else None,
    )


def _check_allocation(recipe: Recipe, path: Path) -> None:
    if not recipe.allocates:
        return
    if not recipe.needs_gradients:
        raise RecipeError(
            f"the recipe {path} allocates sizes by predicted loss, which needs the loss's gradients",
            "take decouple.constants or factorise.metric fisher, or leave allocation out",
        )
    if recipe.decouple.slots == "all":
        raise RecipeError(
            f"the recipe {path} keeps all slots, which leaves no sizes to allocate",
            "take decouple.slots cost, or leave allocation out",
        )


def _weights_suffice(recipe: Recipe) -> bool:
    decouple, factorise = recipe.decouple, recipe.factorise
    return (
        decouple.slots == "all"
        and decouple.constants == "one"
        and factorise.moment == "weights"
        and factorise.metric == "identity"
        and not recipe.needs_held_out
        and not recipe.refits
    )


def _folder() -> Path:
    """The recipes inside an installed wheel, or those of the source tree."""
    source_tree = _PACKAGE.parent / "recipes"
    packaged = _PACKAGE / "_recipes"
    return packaged if packaged.is_dir() else source_tree
