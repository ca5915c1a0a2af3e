"""Recorded operators, on a driver that notes what is started."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.calls import every_call
from tagc.selfcheck.calls import OPERATORS
from tagc.selfcheck.cases import case_of

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
jit = pytest.importorskip("tagc.triton_kernels.jit")
recorded = pytest.importorskip("tagc.triton_kernels.recorded")

BUFFER = torch.zeros(8)


class Compiled:
    """Stands for a kernel; a start notes grid and arguments."""

    def __init__(self, started: list[Any]) -> None:
        self.started = started

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, stream: self.started.append((grid, *arguments, stream))


class Driver:
    """The driver of a device with one stream."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 7)


def kernel(x, out, scale, SIZE):
    """Not compiled."""


def started_by(
    *calls: tuple[Tensor, Tensor | None], torch_of_x: bool = False
) -> tuple[list[tuple[list[Any], float]], int]:
    """What each call of an operator starts, and what torch's function leaves; and how often the
    operator ran itself, to be recorded."""
    started: list[Any] = []
    runs = 0

    def operator(x: Tensor, out: Tensor | None) -> None:
        nonlocal runs
        runs += 1
        jit.torch_call(Tensor.zero_, x if torch_of_x else BUFFER)
        for at in (0, 4):
            run(x[at:], out, 0.5, grid=(3,), warmup=False, SIZE=4, num_warps=1)

    run, found = jit.Kernel(kernel).run, []
    ran = mock.patch.object(jit._Function, "run", return_value=Compiled(started))
    with ran, mock.patch.object(recorded, "active_driver", return_value=Driver):
        bound, last = recorded.Recorded(operator), calls[0]
        for call in calls:
            BUFFER.fill_(1.0)
            pairs = enumerate(zip(call, last, strict=True))
            moved = {
                i: x.data_ptr() - y.data_ptr()
                for i, (x, y) in pairs
                if x is not None and y is not None
            }
            bound.move(moved)
            bound(*((None, None) if bound.ready else call))
            found.append((started[:], float((call[0] if torch_of_x else BUFFER).sum())))
            started.clear()
            last = call
    return found, runs


def expected(x: Tensor, out: Tensor | None) -> list[Any]:
    to = None if out is None else out.data_ptr()
    return [((3, 1, 1), x[at:].data_ptr(), to, 0.5, 4, 7) for at in (0, 4)]


def aligned(n: int) -> Tensor:
    whole = torch.ones(n + 8)
    return whole[(-whole.data_ptr() % 16) // 4 :][:n]


def test_moved_tensors_need_no_record() -> None:
    x, y, out = aligned(16), aligned(16), aligned(16)
    calls = [(x, out), (x, out), (y, out), (y, x), (x, out)]
    found, runs = started_by(*calls)
    assert runs == 1
    # The stub starts nothing while it records.
    assert found == [([], 0.0), *((expected(*call), 0.0) for call in calls[1:])]


def test_another_alignment_is_recorded() -> None:
    x, out = aligned(32), aligned(16)
    found, runs = started_by((x[:16], out), (x[1:17], out), (x[1:17], out), (x[5:21], out))
    assert runs == 2
    assert [bool(starts) for starts, _ in found] == [False, False, True, True]
    assert found[2][0] == expected(x[1:17], out)
    assert found[3][0] == expected(x[5:21], out)


def test_tensors_that_overlap_move_together_or_are_recorded() -> None:
    x, y = aligned(32), aligned(32)
    assert started_by((x[:16], x[8:24]), (y[:16], y[8:24]))[1] == 1
    assert started_by((x[:16], x[8:24]), (y[:16], x[8:24]))[1] == 2


def test_what_torch_has_a_view_of_does_not_move() -> None:
    x, y = aligned(16), aligned(16)
    found, runs = started_by((x, None), (x, None), (y, None), (y, None), torch_of_x=True)
    assert runs == 2
    assert all(total == 0.0 for _, total in found)


class Computing(TorchDispatchMode):
    """Lists torch's operators that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.name() != "aten::detach":
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operator", sorted({*OPERATORS} - {"insert", "peel", "select", "steer"}))
def test_recorded_operators_do_nothing_else(operator: str) -> None:
    """What is not a launch, nor :func:`torch_call`, would be left out of later calls."""
    run = getattr(pytest.importorskip("tagc.triton_kernels.ops"), operator)
    calls = [call for call in every_call() if call.operator == operator]
    for call in (calls[0], calls[1]):
        case = case_of(call)
        with mock.patch.object(jit._Function, "run", return_value=Compiled([])):
            run(**case.tensors, **dict(call.options))  # allocates buffers
            with jit.recording() as listed, Computing() as computing:
                run(**case.tensors, **dict(call.options))
        assert any(x.launch for x in listed)
        assert len(computing.found) == sum(not x.launch for x in listed), computing.found
