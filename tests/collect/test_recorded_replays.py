"""Replays of operators that start what they recorded, at the addresses that tensors then have."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from tagc.codecs.workspace import Workspace
from tagc.collect.lockstep import Lockstep
from tagc.collect.replay import Replay, Store
from tagc.ops import Ops, reference
from tagc.ops.blocks import BlockLayout
from tagc.ops.launches import Dequantize, Quantize
from tagc.ops.program import Launch, Place, Program

CPU, LAYOUT = torch.device("cpu"), BlockLayout(numel=64, bits=4, block=32)


class ByAddress:
    """What an operator of Triton's records: addresses, shapes and strides."""

    def __init__(self, operator: Callable[..., object]) -> None:
        self.operator, self.ready, self.records = operator, False, 0
        self.seen: list[Any] = []

    def move(self, by: Mapping[int, int]) -> None:
        for i, distance in by.items():
            self.seen[i][0] += distance

    def __call__(self, *tensors: Tensor | None) -> None:
        if not self.ready:
            self.records += 1
            # No tensor: nothing may keep FSDP's buffers.
            self.seen = [
                x if x is None else [x.data_ptr(), x.shape, x.stride(), x.dtype] for x in tensors
            ]
        self.operator(*(x and self.at(*x) for x in self.seen))
        self.ready = True

    def start(self, stream: int) -> None:
        assert stream == 7
        self()

    def current_stream(self) -> int:
        return 7

    @staticmethod
    def at(address: int, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


def replayed(ops: Ops, grads: list[Tensor], *, grows: int = -1) -> list[Tensor]:
    """Results; before the gradient number ``grows``, another unit takes more scratch."""
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
        late = {"inp": grad.clone(), "out": torch.zeros(rows, 80)}
        found.append(late)  # so that no two have the same address
        for _ in replay.running(late):
            pass
    return [late["out"] for late in found]


def test_late_tensors_that_move() -> None:
    made: list[ByAddress] = []

    def recorded(operator: Callable[..., object]) -> ByAddress:
        made.append(ByAddress(operator))
        return made[-1]

    recording = SimpleNamespace(
        quantize=reference.quantize,
        dequantize=reference.dequantize,
        compiling_only=None,
        recorded=recorded,
    )
    grads = [torch.randn(2, 80) for _ in range(4)]
    expected = replayed(cast(Ops, reference), grads)
    for grows, records in ((-1, 1), (2, 2)):
        made.clear()
        found = replayed(cast(Ops, recording), grads, grows=grows)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert [x.records for x in made] == [records, records]
