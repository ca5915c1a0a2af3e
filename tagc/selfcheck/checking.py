"""Compares an implementation with the reference, bit for bit, on small inputs, aligned and not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tagc.ops import Ops, get_ops
from tagc.selfcheck.calls import Call
from tagc.selfcheck.cases import case_of
from tagc.selfcheck.inputs import Case
from tagc.selfcheck.placement import PLACEMENTS
from tagc.selfcheck.platform import about


class KernelError(RuntimeError):
    """An implementation whose results differ from the reference's on a device."""


@dataclass
class Checked:
    """The results of a check on a device.

    Attributes:
        platform: the device, and versions.
        calls: the calls that passed, in this check or an earlier one of this process.
        failures: what went wrong, by call.
    """

    platform: dict[str, str]
    calls: list[Call] = field(default_factory=list)
    failures: dict[Call, str] = field(default_factory=dict)

    def __str__(self) -> str:
        where = ", ".join(f"{name} {value}" for name, value in self.platform.items())
        return f"{len(self.calls)} kinds of calls give the reference's bits ({where})"


_PASSED: set[tuple[str, torch.device, Call]] = set()


def check(
    ops: Ops,
    device: torch.device,
    calls: Iterable[Call],
    *,
    progress: Callable[[str], None] = lambda text: None,
    go_on: bool = False,
) -> Checked:
    """Compare an implementation with the reference, on small inputs for every call.

    A call that passed once is not run again in this process.

    Args:
        ops: the implementation.
        device: where it runs; the reference runs on the CPU.
        calls: the operators, dtypes and layouts to check.
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
                    raise KernelError(_message(name, complaint, case, checked.platform))
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


def _message(name: str, complaint: str, case: Case, platform: dict[str, str]) -> str:
    shapes = ", ".join(
        f"{n} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        for n, x in case.tensors.items()
        if x is not None
    )
    where = ", ".join(f"{key} {value}" for key, value in platform.items())
    return (
        f"tagc: {name} does not give the reference's results on this device, so it must not be "
        f"used here. {case.call}: {complaint} (arguments: {shapes}; {where}). Pass "
        "tagc.wrap(..., ops='reference') or set TAGC_OPS=reference, which is slow but exact, and "
        "please report what `tagc doctor` prints"
    )
