"""Every failure the project expects, each with a remedy and an exit code.

Library code raises these; the CLI renders them in one place as ``error: ...`` and ``try: ...``.
"""

from __future__ import annotations


class MLAConvertError(Exception):
    """An expected failure: what is wrong, and what to do about it.

    Attributes:
        message: one sentence saying what is wrong, naming the file, option or value at fault.
        remedy: one sentence saying what to do.
        exit_code: the process's exit status when the CLI ends with this error.
    """

    exit_code = 1

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} (try: {self.remedy})"


class UsageError(MLAConvertError):
    """Options that contradict each other or are out of range."""

    exit_code = 2


class SourceError(MLAConvertError):
    """The source cannot be found or read: no config, a missing shard, a truncated file."""

    exit_code = 3


class UnsupportedArchitectureError(SourceError):
    """No adapter for the source's architecture, or a feature of it that is not supported."""

    exit_code = 4


class UnaccountedTensorError(SourceError):
    """The source holds tensors that its adapter does not know, or lacks some that it needs."""

    exit_code = 5


class PlanError(MLAConvertError):
    """A budget, rank or RoPE size that the source cannot meet."""

    exit_code = 6


class RecipeError(MLAConvertError):
    """A recipe that does not exist or does not validate."""

    exit_code = 7


class TextError(MLAConvertError):
    """Calibration or evaluation text that cannot be read or is too short."""

    exit_code = 8


class OutputError(MLAConvertError):
    """The output folder exists, or cannot be written whole."""

    exit_code = 9


class FormatError(MLAConvertError):
    """The chosen output format cannot express the source, with the reason."""

    exit_code = 10


class StatisticsError(MLAConvertError):
    """Saved calibration statistics that do not belong to this source and recipe."""

    exit_code = 11


class VerificationError(MLAConvertError):
    """What was written does not answer as it should when it is loaded again."""

    exit_code = 12


class CacheFullError(MLAConvertError):
    """A decoding cache with fewer pages left than a sequence needs."""

    exit_code = 13


class HealError(MLAConvertError):
    """Healing that cannot go on: a teacher that does not fit, a loss that is not finite, checkpoints of another run."""

    exit_code = 14


class HubError(MLAConvertError):
    """The hub cannot be written to: no token or permission, a repository that holds other files, no network."""

    exit_code = 15
