"""The machine behind the numbers, for the head of every result."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
from pathlib import Path
from typing import Any

import torch

import tagc


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Date, device, threads, versions, and the load of the last minute."""
    device = torch.device(device)
    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": device.type,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tagc": tagc.__version__,
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        facts["triton"] = importlib.import_module("triton").__version__
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
