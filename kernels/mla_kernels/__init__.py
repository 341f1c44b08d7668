"""Decode kernels for multi-head latent attention. They take tensors and know nothing of ``mla_convert``.

Importing the package costs nothing: torch, and triton where it is used, are imported with the first name that is asked
for. :func:`mla_decode` is the kernel; :func:`choose_backend` says what suits a device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_kernels.backends import Backend, choose_backend
    from mla_kernels.decode import mla_decode
    from mla_kernels.eager import eager_decode
    from mla_kernels.errors import InvalidInputError, KernelError, UnsupportedDeviceError, UnsupportedShapeError
    from mla_kernels.flash_mla import flash_mla_with_kvcache, get_mla_metadata
    from mla_kernels.fp8 import Fp8Layout, dequantize_latent, fp8_layout, quantize_latent
    from mla_kernels.hf import use_mla_kernels
    from mla_kernels.merge import merge_states
    from mla_kernels.reference import reference_decode

_HOME = {
    "Backend": "backends",
    "Fp8Layout": "fp8",
    "InvalidInputError": "errors",
    "KernelError": "errors",
    "UnsupportedDeviceError": "errors",
    "UnsupportedShapeError": "errors",
    "choose_backend": "backends",
    "dequantize_latent": "fp8",
    "eager_decode": "eager",
    "flash_mla_with_kvcache": "flash_mla",
    "fp8_layout": "fp8",
    "get_mla_metadata": "flash_mla",
    "merge_states": "merge",
    "mla_decode": "decode",
    "quantize_latent": "fp8",
    "reference_decode": "reference",
    "use_mla_kernels": "hf",
}

__all__ = [
    "Backend",
    "Fp8Layout",
    "InvalidInputError",
    "KernelError",
    "UnsupportedDeviceError",
    "UnsupportedShapeError",
    "choose_backend",
    "dequantize_latent",
    "eager_decode",
    "flash_mla_with_kvcache",
    "fp8_layout",
    "get_mla_metadata",
    "merge_states",
    "mla_decode",
    "quantize_latent",
    "reference_decode",
    "use_mla_kernels",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
