"""The frequencies a source's rotary embedding ends up with, taken from transformers' own initialisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_convert.errors import UnsupportedArchitectureError
from mla_convert.spec import RopeSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Kinds whose frequencies are the same at every length; the others change them while the model runs.
SUPPORTED_KINDS = ("default", "linear", "llama3", "yarn")

_REASONS = {
    "dynamic": "its frequencies change with the length of the input",
    "longrope": "it has two sets of frequencies and changes between them with the length of the input",
}


def rope_spec(config: PretrainedConfig, rotary_class: Any, head_dim: int) -> RopeSpec:
    """Return the float32 frequencies, kind and cos/sin factor that ``rotary_class(config)`` computes.

    Args:
        rotary_class: the family's rotary module in transformers, built from a config.

    Raises:
        UnsupportedArchitectureError: the kind is not one with fixed frequencies, or only part of the head rotates.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    kind = str(parameters.get("rope_type", "default"))
    if kind not in SUPPORTED_KINDS:
        reason = _REASONS.get(kind, "it is not known to this project")
        raise UnsupportedArchitectureError(
            f"RoPE type '{kind}' cannot be converted: {reason}",
            f"use a source whose rope_type is one of {', '.join(SUPPORTED_KINDS)}",
        )
    rotary = rotary_class(config)
    inv_freq = tuple(float(frequency) for frequency in rotary.inv_freq.float())
    # Some classes ignore the factor and rotate everything; a checkpoint that states it was not trained that way.
    if 2 * len(inv_freq) != head_dim or parameters.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedArchitectureError(
            f"only part of the {head_dim} dims of a head rotate", "use a source with full rotary embeddings"
        )
    return RopeSpec(head_dim, inv_freq, kind, parameters, float(rotary.attention_scaling))
