"""The frequencies a source's rotary embedding ends up with, taken from transformers' own initialisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.spec import RopeSpec, RopeUpdate

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Kinds whose frequencies are the same at every length; the others have a RopeUpdate.
FIXED_KINDS = ("default", "linear", "llama3", "yarn")
_KINDS = (*FIXED_KINDS, "dynamic", "longrope")


def rope_spec(config: PretrainedConfig, rotary_class: Any, head_dim: int, *, interleaved: bool = False) -> RopeSpec:
    """Return the float32 frequencies, kind and cos/sin factor that ``rotary_class(config)`` computes.

    Args:
        rotary_class: the family's rotary module in transformers, built from a config.

    Raises:
        UnsupportedArchitectureError: the kind is not known, its parameters do not do, or it does not turn the part of
            a head that the config says.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if (kind := _kind(parameters)) not in _KINDS:
        raise _unknown(kind)
    try:
        rotary = rotary_class(config)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        said = " ".join(str(error).split())
        raise UnsupportedArchitectureError(
            f"{rotary_class.__name__} of transformers cannot be made from config.json ({type(error).__name__}: {said})",
            "check rope_parameters, or rope_scaling and rope_theta, and head_dim in config.json",
        ) from error
    frequencies = [float(frequency) for frequency in rotary.inv_freq.float()]
    # Some classes ignore the factor and rotate everything; a checkpoint that states it was not trained that way.
    factor = parameters.get("partial_rotary_factor")
    if 2 * len(frequencies) != int(head_dim * (1.0 if factor is None else factor)):
        raise UnsupportedArchitectureError(
            f"config.json says that a share of {factor} of the {head_dim} dims of a head rotates, and its class "
            f"rotates {2 * len(frequencies)}",
            "check partial_rotary_factor and head_dim in config.json",
        )
    return padded_rope(
        frequencies,
        head_dim,
        parameters,
        attention_scaling=float(rotary.attention_scaling),
        interleaved=interleaved,
        update=_update(config, parameters, rotary),
    )


def padded_rope(
    frequencies: Sequence[float],
    head_dim: int,
    parameters: dict[str, Any],
    *,
    attention_scaling: float = 1.0,
    interleaved: bool = False,
    update: RopeUpdate | None = None,
) -> RopeSpec:
    """Return the RopeSpec of a head whose first dims turn at ``frequencies`` and whose other dims do not.

    Raises:
        UnsupportedArchitectureError: the kind is not known, or a head has an odd number of dims.
    """
    kind = _kind(parameters)
    if kind not in FIXED_KINDS and update is None:
        raise _unknown(kind)
    if head_dim % 2:
        raise UnsupportedArchitectureError(
            f"a head has {head_dim} dims, which do not pair", "use a source with an even head dim"
        )
    rest = (0.0,) * (head_dim // 2 - len(frequencies))
    return RopeSpec(
        dim=2 * len(frequencies),
        inv_freq=(*frequencies, *rest),
        kind=kind,
        parameters=parameters,
        attention_scaling=attention_scaling,
        interleaved=interleaved,
        update=update,
    )


def _kind(parameters: Mapping[str, Any]) -> str:
    return str(parameters.get("rope_type", "default"))


def _unknown(kind: str) -> UnsupportedArchitectureError:
    return UnsupportedArchitectureError(
        f"RoPE type '{kind}' cannot be converted: it is not known to this project",
        f"use a source whose rope_type is one of {', '.join(_KINDS)}",
    )


def _update(config: PretrainedConfig, parameters: dict[str, Any], rotary: Any) -> RopeUpdate | None:
    kind = parameters.get("rope_type")
    if kind == "longrope":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        original = int(parameters["original_max_position_embeddings"])
        beyond, _ = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=original + 1)
        return RopeUpdate("longrope", original, inv_freq=tuple(float(frequency) for frequency in beyond))
    if kind == "dynamic":
        return RopeUpdate(
            "dynamic",
            int(rotary.original_max_seq_len),
            theta=float(parameters["rope_theta"]),
            factor=float(parameters["factor"]),
        )
    return None
