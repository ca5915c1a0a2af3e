"""Replays of operators that start what they recorded, at the addresses that tensors then have."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tagc.codecs.workspace import Workspace
from tagc.collect.lockstep import Lockstep
from tagc.collect.replay import Replay, Store
from tagc.ops import Ops, reference
from tagc.ops.blocks import BlockLayout
from tagc.ops.launches import Dequantize, Quantize
from tagc.ops.program import Launch, Place, Program

Tied = Sequence[tuple[int, int | None]]
CPU, LAYOUT = torch.device("cpu"), BlockLayout(numel=64, bits=4, block=32)


class ByAddress:
    """What an operator of Triton's records: addresses, shapes and strides."""

    def __init__(self, operator: Callable[..., object], tied: Tied = ()) -> None:
        self.operator, self.ready, self.tied = operator, False, tied
        self.records = self.started = 0
        self.seen: list[Any] = []

    def __call__(self, *tensors: Tensor | None) -> None:
        self.records += 1
        # No tensor: nothing may keep FSDP's buffers.
        self.seen = [
            x if x is None else [x.data_ptr(), x.shape, x.stride(), x.dtype] for x in tensors
        ]
        self.places = {i: [(x, 0)] for i, x in enumerate(self.seen) if x is not None}
        self.operator(*tensors)
        self.ready = True

    def starts(self, stream: int) -> Iterator[tuple[Callable[..., object], list[Any]]]:
        yield self.start, self.seen

    def start(self, *seen: Any) -> None:
        self.started += 1
        self.operator(*(x and self.at(*x) for x in seen))

    @staticmethod
    def at(address: int, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


def replayed(
    ops: Ops, grads: list[Tensor], *, grows: int = -1, ends: Mapping[int, int] = {}
) -> list[Tensor]:
    """Results; before the gradient number ``grows``, another unit takes more scratch. ``ends``: by
    how many bytes less than a multiple of 16 the addresses of a gradient and its result end."""
    rows, words = 2, LAYOUT.words
    inp = Place("inp", (rows, 80), torch.float32, "late")
    out = Place("out", (rows, 80), torch.float32, "late")
    message = Place("message", (rows, words), torch.int32)
    residual = Place("residual", (rows, 64), torch.float32, "state")
    program = Program.of(
        "a program",
        [
            ("encode", [Launch(Quantize(LAYOUT), (inp[8:72], residual, message))]),
            ("decode", [Launch(Dequantize(layout=LAYOUT), (message, out[16:80]))]),
        ],
    )
    store = Store(CPU, Workspace(CPU))
    replay = Replay(program, store, ops, {}, Lockstep("gradients", "unit", CPU), 0)
    found = []
    for i, grad in enumerate(grads):
        if i == grows:
            store.workspace.take("message", (rows, 2 * words), torch.int32).fill_(-1)
        late = {"inp": at_end(grad, ends.get(i, 0)), "out": at_end(0 * grad, ends.get(i, 0))}
        found.append(late)  # so that no two have the same address
        for _ in replay.running(late):
            pass
    return [late["out"] for late in found]


def at_end(x: Tensor, end: int) -> Tensor:
    """A copy whose address is ``end`` bytes above a multiple of 16."""
    memory = torch.zeros(x.numel() + 8)
    first = (end - memory.data_ptr()) % 16 // 4
    return memory[first : first + x.numel()].view(x.shape).copy_(x)


@pytest.mark.parametrize(
    ("how", "records"),
    [
        ({}, 1),
        ({"grows": 2}, 2),
        ({"ends": {2: 4}}, 3),  # there and back
        ({"ends": {2: 4, 3: 4}}, 2),
    ],
)
def test_late_tensors_that_move(how: Any, records: int) -> None:
    made = recording(**how)
    assert [x.records for x in made] == [records, records]
    assert [x.started for x in made] == [4 - records, 4 - records]


@pytest.mark.parametrize(("tied", "records"), [([(0, 0), (1, 1)], 1), ([(0, None)], 4)])
def test_tensors_that_may_not_move(tied: Tied, records: int) -> None:
    made = recording(tied)
    assert [x.records for x in made] == [records, records]


def recording(tied: Tied = (), **how: Any) -> list[ByAddress]:
    """The operators of a replay, which has the results of one that does not record."""
    made: list[ByAddress] = []

    def recorded(operator: Callable[..., object]) -> ByAddress:
        made.append(ByAddress(operator, tied))
        return made[-1]

    ops = SimpleNamespace(
        quantize=reference.quantize,
        dequantize=reference.dequantize,
        compiling_only=None,
        recorded=recorded,
    )
    grads = [torch.randn(2, 80) for _ in range(4)]
    expected = replayed(cast(Ops, reference), grads, **how)
    found = replayed(cast(Ops, ops), grads, **how)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    return made
