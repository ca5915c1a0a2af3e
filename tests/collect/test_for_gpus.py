"""What only GPUs need, with stand-ins: alarms that go off in the same step on all ranks, and
replays that start what they recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tagc.codecs.workspace import Workspace
from tagc.collect import lockstep
from tagc.collect.lockstep import LAG, Alarm, Lockstep
from tagc.collect.replay import Replay, Store
from tagc.ops import Ops, reference
from tagc.ops.blocks import BlockLayout
from tagc.ops.launches import Dequantize, Quantize
from tagc.ops.program import Launch, Place, Program


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda")  # type: ignore[assignment]


def gpu(done: bool) -> Any:
    """torch with a GPU that is done with everything at once, or only when it is waited for."""

    class Event:
        def __init__(self) -> None:
            self.known = False

        def record(self, stream: torch.device) -> None:
            self.known = done

        def query(self) -> bool:
            return self.known

        def synchronize(self) -> None:
            self.known = True

    def zeros(size: tuple[()], *, dtype: torch.dtype, **_: Any) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    return SimpleNamespace(
        zeros=zeros,
        cuda=SimpleNamespace(Event=Event, current_stream=lambda device: device),
        **{name: getattr(torch, name) for name in ("bool", "nan", "inference_mode")},
    )


def raised_at(done: bool, wrong_at: int, steps: int = 12) -> list[int]:
    """Steps in which a rank raises, if the condition is true in one of them."""
    found = []
    with patch.object(lockstep, "torch", gpu(done)):
        tested = Alarm("wrong")
        for step in range(steps):
            try:
                tested.check()
            except RuntimeError:
                found.append(step)
            floats = torch.ones(3)
            tested.note(torch.tensor(step == wrong_at).as_subclass(OnGpu), floats)
            assert bool(floats.isnan().all()) == (step == wrong_at)
    return found


@pytest.mark.parametrize("wrong_at", [-1, 0, 1, 5])
def test_ranks_raise_in_the_same_steps(wrong_at: int) -> None:
    fast, slow = (raised_at(done, wrong_at) for done in (True, False))
    raised = range(wrong_at + LAG + 1, 12) if wrong_at >= 0 else ()
    assert fast == slow == list(raised)


@pytest.mark.parametrize("before", [1, LAG + 3])
def test_what_was_put_right_is_forgotten(before: int) -> None:
    with patch.object(lockstep, "torch", gpu(True)):
        tested = Alarm("wrong")
        for wrong in [True] * before:
            tested.note(torch.tensor(wrong).as_subclass(OnGpu), torch.ones(1))
        tested.reset()
        for _ in range(2 * LAG + 2):
            tested.note(torch.tensor(False).as_subclass(OnGpu), torch.ones(1))
            tested.check()


def test_a_cpu_raises_at_once() -> None:
    with pytest.raises(RuntimeError, match="wrong"):
        Alarm("wrong").note(torch.tensor(True), torch.ones(1))


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
        for _ in replay.running(**late):
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
    for one, other in zip(replayed(cast(Ops, recording), grads), expected, strict=True):
        assert torch.equal(one, other)
    assert [x.records for x in made] == [1, 1]
    made.clear()
    found = replayed(cast(Ops, recording), grads, grows=2)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert [x.records for x in made] == [2, 2]


@pytest.mark.parametrize("fails", ["first", "later"])
def test_after_a_failure_nothing_recorded_is_started(fails: str) -> None:
    """The caller binds again: scratch has gone."""
    made: list[Any] = []

    def broken(*args: Any, **options: Any) -> None:
        made.append(args)
        if len(made) == (1 if fails == "first" else 2):
            raise RuntimeError("no memory")
        reference.quantize(*args, **options)

    recording = SimpleNamespace(
        quantize=broken, dequantize=reference.dequantize, compiling_only=None, recorded=ByAddress
    )
    with pytest.raises(RuntimeError, match="no memory") as caught:
        replayed(cast(Ops, recording), [torch.randn(2, 80) for _ in range(3)])
    assert "in a program: Quantize(" in caught.value.__notes__[0]
