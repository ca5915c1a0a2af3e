"""Compares an implementation with the reference, bit for bit, on small inputs, aligned and not; at
``wrap`` for the calls of a model, in ``tagc doctor`` for all."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tagc.basics.progress import Progress
from tagc.basics.version import __version__
from tagc.ops import Ops, compiles_ahead, get_ops
from tagc.selfcheck.calls import Call, every_call
from tagc.selfcheck.cases import case_of
from tagc.selfcheck.inputs import PLACEMENTS, Case

# For example "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54 ...".
_MODULE = Path("/proc/driver/nvidia/version")


class KernelError(RuntimeError):
    """An implementation whose results differ from the reference's on a device."""


@dataclass
class Checked:
    """The results of a check on a device: the calls that passed, in this check or an earlier one of
    this process, and what went wrong with others."""

    platform: dict[str, str]
    calls: list[Call] = field(default_factory=list)
    failures: dict[Call, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.platform.items())

    def __str__(self) -> str:
        return f"{len(self.calls)} kinds of calls give the reference's bits ({self.where})"


_PASSED: set[tuple[str, torch.device, Call]] = set()


def check(
    ops: Ops,
    device: torch.device,
    calls: Iterable[Call],
    *,
    progress: Callable[[str], None] = lambda text: None,
    go_on: bool = False,
) -> Checked:
    """Compare an implementation on a device with the reference on the CPU, on small inputs for
    every call. A call that passed once is not run again in this process.

    Args:
        progress: called with a line of text before each call that is run.
        go_on: whether to report a failure and continue.

    Raises:
        KernelError: at the first failure, if ``go_on`` is false.
    """
    checked = Checked(about(device))
    for call in calls:
        name = getattr(ops, "__name__", type(ops).__name__)
        if (name, device, call) not in _PASSED:
            progress(str(call))
            case = case_of(call)
            complaint = complaint_about(ops, device, case)
            if complaint is not None:
                if not go_on:
                    raise KernelError(_message(name, complaint, case, checked.where))
                checked.failures[call] = complaint
                continue
            _PASSED.add((name, device, call))
        checked.calls.append(call)
    return checked


def complaint_about(
    ops: Ops, device: torch.device, case: Case, placements: Iterable[str] = PLACEMENTS
) -> str | None:
    """The first difference or error; None if there is none."""
    wanted = case.run(get_ops("cpu", "reference"), Tensor.clone)
    for how in placements:
        place = PLACEMENTS[how]
        try:
            # A failed kernel raises when the host waits for it, which a copy does.
            got = case.run(ops, lambda x, place=place: place(x, device))
        except Exception as error:
            return f"{how}: {type(error).__name__}: {error}"
        for name, want in wanted.items():
            different = (_bits(got[name]) != _bits(want)).sum().item()
            if different:
                return f"{how}: {different} of {want.numel()} elements of {name!r} differ"
    return None


def _bits(x: Tensor) -> Tensor:
    """Integers that are equal exactly where elements have the same bits; all NaNs are equal."""
    if not x.dtype.is_floating_point:
        return x
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.where(x.isnan(), -1, x.contiguous().view(whole))


def _message(name: str, complaint: str, case: Case, where: str) -> str:
    shapes = ", ".join(
        f"{n} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        for n, x in case.tensors.items()
        if x is not None
    )
    return (
        f"tagc: {name} does not give the reference's results on this device, so it must not be "
        f"used here. {case.call}: {complaint} (arguments: {shapes}; {where}). Pass "
        "tagc.wrap(..., ops='reference') or set TAGC_OPS=reference, which is slow but exact, and "
        "please report what `tagc doctor` prints"
    )


def examine(device: torch.device, ops: str | None = None, *, every: bool = False) -> Checked:
    """Print the device and its software, and check the operators: on a CPU, where compiling takes
    minutes, one call of each unless ``every`` is true."""
    for name, value in about(device, driver=True).items():
        print(f"{name:12}{value}")
    implementation = get_ops(device, ops)
    calls = list(every_call())
    if not every and not compiles_ahead(implementation):
        calls = list({call.operator: call for call in reversed(calls)}.values())
    begin, progress = time.monotonic(), Progress("operators checked", len(calls))
    checked = check(implementation, device, calls, progress=lambda _: progress.step(), go_on=True)
    progress.end()
    for call, complaint in checked.failures.items():
        print(f"WRONG       {call}: {complaint}")
    print(
        f"operators   {len(checked.calls)} of {len(calls)} kinds of calls give the reference's "
        f"bits ({time.monotonic() - begin:.0f} s)",
        flush=True,
    )
    return checked


@cache
def about(device: torch.device | str, *, driver: bool = False) -> dict[str, str]:
    """The device and the versions of its software, by name. ``driver``: if the kernel does not
    state the driver's version, ask nvidia-smi, which takes a moment; also name Python and the
    system."""
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
        text = _MODULE.read_text()
    except OSError:
        return None
    found = re.search(r"Module.*?\b(\d+\.[\d.]+)", text)
    return found[1] if found else None


def _driver() -> str:
    """The driver's version from nvidia-smi, because torch knows only the CUDA version."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return text.stdout.split("\n")[0].strip()
