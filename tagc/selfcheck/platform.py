"""The device and the versions of its software, for messages and bug reports."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from functools import cache
from pathlib import Path

import torch

from tagc.basics.version import __version__

# For example "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54 ...".
_MODULE = Path("/proc/driver/nvidia/version")


@cache
def about(device: torch.device | str, *, driver: bool = False) -> dict[str, str]:
    """The device and the versions of its software, by name.

    Args:
        driver: if the kernel does not state the driver's version, ask nvidia-smi, which takes a
            moment; also name Python and the system.
    """
    found = {"tagc": __version__, "torch": torch.__version__, "triton": _version("triton")}
    device = torch.device(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": str(torch.version.cuda),
        } | found
        found["driver"] = _loaded_driver() or (_driver() if driver else "unknown")
    else:
        found = {
            "device": device.type,
            "processor": platform.processor() or platform.machine(),
        } | found
        found["numba"] = _version("numba")
    if driver:
        found |= {"python": platform.python_version(), "system": platform.platform()}
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _loaded_driver() -> str | None:
    """Version of the driver module that Linux has loaded; None if it does not say."""
    try:
        said = _MODULE.read_text()
    except OSError:
        return None
    found = re.search(r"Module.*?\b(\d+\.[\d.]+)", said)
    return found[1] if found else None


def _driver() -> str:
    """The driver's version from nvidia-smi, because torch knows only the CUDA version."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return said.stdout.split("\n")[0].strip()
