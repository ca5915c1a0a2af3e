"""Recorded operators, on a driver that notes what is started."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

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


def started_by(calls: list[tuple[Any, ...]], movable: bool = True) -> tuple[list[Any], int]:
    """What each call of an operator starts, and how often it was recorded."""
    started: list[Any] = []
    runs = 0

    def operator(x: Tensor, out: Tensor | None, *, scale: float) -> None:
        nonlocal runs
        runs += 1
        jit.torch_call(Tensor.zero_, BUFFER if movable else x)
        for at in (0, 4):
            made(x[at:], out, scale, grid=(3,), warmup=False, SIZE=4, num_warps=1)

    made = jit.Kernel(kernel).run
    ran = mock.patch.object(jit._Function, "run", return_value=Compiled(started))
    with ran, mock.patch.object(recorded, "active_driver", return_value=Driver):
        bound, found = recorded.Recorded(operator), []
        for x, out in calls:
            BUFFER.fill_(1.0)
            bound(x, out, scale=0.5)
            found.append((started[:], float(BUFFER.sum() if movable else x.sum())))
            started.clear()
    return found, runs


def expected(x: Tensor, out: Tensor | None) -> list[Any]:
    to = None if out is None else out.data_ptr()
    return [((3, 1, 1), x[at:].data_ptr(), to, 0.5, 4, 7) for at in (0, 4)]


def aligned(n: int) -> Tensor:
    whole = torch.ones(n + 8)
    return whole[(-whole.data_ptr() % 16) // 4 :][:n]


def test_moved_tensors_need_no_record() -> None:
    x, y, out = aligned(16), aligned(16), aligned(16)
    found, runs = started_by([(x, out), (x, out), (y, out), (y, x), (x, out)])
    # The stub starts nothing while it records.
    assert found == [
        ([], 0.0),
        *((expected(*pair), 0.0) for pair in ((x, out), (y, out), (y, x), (x, out))),
    ]
    assert runs == 1


def test_another_alignment_is_recorded() -> None:
    x, out = aligned(32), aligned(16)
    found, runs = started_by([(x[:16], out), (x[1:17], out), (x[1:17], out), (x[5:21], out)])
    assert runs == 2
    assert [bool(starts) for starts, _ in found] == [False, False, True, True]
    assert found[2][0] == expected(x[1:17], out)
    assert found[3][0] == expected(x[5:21], out)


def test_tensors_that_overlap_move_together_or_are_recorded() -> None:
    x, y = aligned(32), aligned(32)
    _, runs = started_by([(x[:16], x[8:24]), (y[:16], y[8:24])])
    assert runs == 1
    _, runs = started_by([(x[:16], x[8:24]), (y[:16], x[8:24])])
    assert runs == 2


def test_what_torch_has_a_view_of_does_not_move() -> None:
    x, y = aligned(16), aligned(16)
    found, runs = started_by([(x, None), (x, None), (y, None), (y, None)], movable=False)
    assert runs == 2
    assert all(total == 0.0 for _, total in found)
