"""Where calibration and refits compute, by the names that torch gives devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mla_convert.errors import UsageError


def computing_devices(names: Sequence[str]) -> tuple[torch.device, ...]:
    """Return the devices of such names; the CPU where none is named. Each that is named is one of the machine's.

    Raises:
        UsageError: a name is none of torch's, or of a device that this machine or this torch does not have.
    """
    return tuple(map(_device, names)) or (torch.device("cpu"),)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"there is no device {name!r}", "give cpu, cuda or cuda:1, for example") from error
    if device.type == "cpu":
        return device
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "is_available") or not hasattr(module, "device_count"):
        raise UsageError(f"this project does not compute on {name!r}", "give cpu, cuda or cuda:1, for example")
    count = module.device_count() if module.is_available() else 0
    if count == 0:
        raise UsageError(f"this torch sees no device of the kind {device.type!r}", "leave --device out, for the CPU")
    index = device.index or 0
    if index >= count:
        known = ", ".join(f"{device.type}:{i}" for i in range(count))
        raise UsageError(f"there is no device {name!r}", f"there are {known}")
    return torch.device(device.type, index)
