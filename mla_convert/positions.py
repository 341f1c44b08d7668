"""How long a text a model can read at all, as opposed to how long a text it was trained on."""

from __future__ import annotations

from typing import Any

from mla_convert.errors import UsageError

# Model type -> the config's field for the rows of a table of positions, beyond which its class fails.
_TABLES = {"mla_convert": "learned_positions", "gpt2": "n_positions", "mpt": "max_seq_len"}


def check_positions(model: Any, tokens: int) -> None:
    """Check that ``model`` has a position for each of ``tokens`` tokens.

    Raises:
        UsageError: its positions are a table of fewer rows; RoPE and ALiBi have no such end.
    """
    config = getattr(model, "config", None)
    limit = getattr(config, _TABLES.get(getattr(config, "model_type", ""), ""), 0)
    if limit and tokens > limit:
        raise UsageError(
            f"a context of {tokens} tokens is longer than the {limit} positions that the model has",
            f"give --context {limit} or less",
        )
