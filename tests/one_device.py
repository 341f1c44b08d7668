"""Whether code keeps what it computes on one device, without such a device: on meta tensors, which have no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OneDevice(TorchDispatchMode):
    """Within it, no operation but a copy takes tensors of two devices; numbers without dims may come from the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 0]
        if "copy" not in str(func) and len({x.device for x in tensors}) > 1:
            raise RuntimeError(f"two devices meet in {func}")
        return func(*args, **(kwargs or {}))


@contextmanager
def one_device() -> Iterator[None]:
    """Within it the meta device refuses, as a GPU does, to compute with the CPU's tensors, and gives it ones."""
    move, item, truth = Tensor.cpu, Tensor.item, Tensor.__bool__
    with pytest.MonkeyPatch.context() as patch, OneDevice():
        patch.setattr(Tensor, "cpu", lambda x: torch.ones_like(x, device="cpu") if x.is_meta else move(x))
        patch.setattr(Tensor, "item", lambda x: 1.0 if x.is_meta else item(x))
        patch.setattr(Tensor, "__bool__", lambda x: True if x.is_meta else truth(x))
        yield
