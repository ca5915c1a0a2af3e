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


def kernel(x, out, scale, SIZE):
    """Not compiled."""


def recorded_of(
    x: Tensor, out: Tensor | None, started: list[Any], *, torch_of_x: bool = False
) -> Any:
    """An operator that has recorded two launches and a function of torch's."""

    def operator(x: Tensor, out: Tensor | None) -> None:
        jit.torch_call(Tensor.zero_, x if torch_of_x else BUFFER)
        for at in (0, 4):
            run(x[at:], out, 0.5, grid=(3,), warmup=False, SIZE=4, num_warps=1)

    run = jit.Kernel(kernel).run
    with mock.patch.object(jit._Function, "run", return_value=Compiled(started)):
        made = recorded.Recorded(operator)
        assert not made.ready
        made(x, out)
    assert made.ready
    return made


def start(made: Any) -> None:
    for function, arguments in made.starts(7):
        function(*arguments)


def expected(x: Tensor, out: Tensor | None) -> list[Any]:
    to = None if out is None else out.data_ptr()
    return [((3, 1, 1), x[at:].data_ptr(), to, 0.5, 4, 7) for at in (0, 4)]


def test_starts_what_was_recorded_where_tensors_are_now() -> None:
    x, y, out = torch.ones(16), torch.ones(16), torch.ones(16)
    started: list[Any] = []
    made = recorded_of(x, out, started)
    assert not started  # the stub starts nothing while it records
    for to in (x, y):
        BUFFER.fill_(1.0)
        start(made)
        assert started == expected(to, out)
        assert not BUFFER.any()
        started.clear()
        for arguments, place in made.places[0]:
            arguments[place] += y.data_ptr() - x.data_ptr()
    assert made.tied == []


def test_tensors_that_overlap_are_tied() -> None:
    x = torch.ones(32)
    assert recorded_of(x[:16], x[8:24], []).tied == [(0, 1)]


def test_what_torch_has_a_view_of_does_not_move() -> None:
    made = recorded_of(torch.ones(16), None, [], torch_of_x=True)
    assert made.tied == [(0, None)]


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
