"""What results and speed may depend on, for messages and reports of bugs."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from functools import cache

import torch

from tagc.version import __version__


@cache
def about(device: torch.device | str, *, driver: bool = False) -> dict[str, str]:
    """The device and the versions of what runs on it, by name.

    Args:
        driver: ask for the driver's version, too, which takes a moment.
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
        if driver:
            found["driver"] = _driver()
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


def _driver() -> str:
    """As nvidia-smi says: torch knows only which CUDA it supports."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return said.stdout.split("\n")[0].strip()
