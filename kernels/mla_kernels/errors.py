"""What can go wrong before a kernel runs: each error says what is wrong and what to do about it."""

from __future__ import annotations


class KernelError(ValueError):
    """A call that cannot be carried out. Nothing has been launched or written when it is raised.

    Attributes:
        what: what is wrong, naming the argument and its value.
        remedy: what to do.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


class InvalidInputError(KernelError):
    """An argument of a wrong dtype, device or shape, or lengths that the cache or its block table cannot hold."""


class UnsupportedShapeError(KernelError):
    """A latent rank, RoPE size or page size that no tile fits."""


class UnsupportedDeviceError(KernelError):
    """The device cannot run the kernel: it is no GPU, it is too old, or Triton is missing."""
