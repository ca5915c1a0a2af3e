"""Compares an implementation with the reference, bit for bit, on small inputs, aligned and not; at
``wrap`` for the calls of a model, in ``tagc doctor`` for all."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tagc.basics.progress import Progress
from tagc.basics.version import __version__
from tagc.ops import Ops, compiles_ahead, get_ops
from tagc.selfcheck.calls import Call
from tagc.selfcheck.cases import case_of
from tagc.selfcheck.inputs import PLACEMENTS, Case

# For example "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54 ...".
_MODULE = Path("/proc/driver/nvidia/version")


class KernelError(RuntimeError):
    """An implementation whose results differ from the reference's on a device."""


_PASSED: set[tuple[str, torch.device, Call]] = set()


def check(
    ops: Ops,
    device: torch.device,
    calls: Iterable[Call],
    progress: Callable[[], None] = lambda: None,
) -> str:
    """Compare an implementation on a device with the reference on the CPU, on small inputs for
    every call. A call that passed once is not run again in this process. Returns a note for users.

    Args:
        progress: called before each call that is run.

    Raises:
        KernelError: at the first difference or error.
    """
    name, calls = getattr(ops, "__name__", type(ops).__name__), list(calls)
    where = ", ".join(f"{what} {value}" for what, value in about(device).items())
    for call in calls:
        if (name, device, call) not in _PASSED:
            progress()
            case = case_of(call)
            complaint = complaint_about(ops, device, case)
            if complaint is not None:
                raise KernelError(_message(name, complaint, case, where))
            _PASSED.add((name, device, call))
    return f"{len(calls)} kinds of calls give the reference's bits ({where})"


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


def examine(device: torch.device, calls: Sequence[Call]) -> bool:
    """Print the device and its software, and check calls of operators: on a CPU, where compiling
    takes minutes, one of each operator. Returns whether all are right."""
    system = {"python": platform.python_version(), "system": platform.platform()}
    for name, value in (about(device) | system).items():
        print(f"{name:12}{value}")
    implementation = get_ops(device)
    if not compiles_ahead(implementation):
        calls = list({call.operator: call for call in reversed(calls)}.values())
    begin, progress = time.monotonic(), Progress("operators checked", len(calls))
    complaints: dict[Call, str | None] = {}
    for call in calls:
        progress.step()
        complaints[call] = complaint_about(implementation, device, case_of(call))
    progress.end()
    wrong = [f"{call}: {why}" for call, why in complaints.items() if why is not None]
    for line in wrong:
        print(f"WRONG       {line}")
    print(
        f"operators   {len(calls) - len(wrong)} of {len(calls)} kinds of calls give the "
        f"reference's bits ({time.monotonic() - begin:.0f} s)",
        flush=True,
    )
    return not wrong


@cache
def about(device: torch.device | str) -> dict[str, str]:
    """The device and the versions of its software, by name."""
    device = torch.device(device)
    software = {"tagc": __version__, "torch": torch.__version__, "triton": _version("triton")}
    if device.type != "cuda":
        processor = platform.processor() or platform.machine()
        found = {"device": device.type, "processor": processor}
        return found | software | {"numba": _version("numba")}
    properties = torch.cuda.get_device_properties(device)
    found = {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda),
    }
    return found | software | {"driver": _driver()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    """Version of the driver module that Linux has loaded; torch knows only the CUDA version."""
    try:
        found = re.search(r"Module.*?\b(\d+\.[\d.]+)", _MODULE.read_text())
    except OSError:
        found = None
    return found[1] if found else "unknown"
