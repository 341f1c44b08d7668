"""What the numbers were measured on: processor or card, driver, versions and load."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "numpy")


def describe() -> dict[str, Any]:
    """Return names, versions and the load average; a GPU is asked through nvidia-smi and is not touched."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "gpu": _gpu(),
    }


def describe_device() -> dict[str, Any]:
    """Return what the CUDA runtime says of the current device."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "cuda": torch.version.cuda,
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        lines = (line.partition(":") for line in information.read_text(encoding="utf-8").splitlines())
        fields = {key.strip(): value.strip() for key, _, value in lines}
        if name := fields.get("model name"):
            return f"{name} (family {fields.get('cpu family')}, model {fields.get('model')})"
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> dict[str, str] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    fields = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": str(error)}
    return dict(zip(fields, (value.strip() for value in answer.splitlines()[0].split(",")), strict=False))
