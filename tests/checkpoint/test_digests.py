"""A changed bit in what was saved is refused; copies and digests of a device's tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tagc.checkpoint import State
from tagc.checkpoint import format as state_format
from tagc.checkpoint.by_parameter import ParamLocation, Part
from tagc.checkpoint.format import (
    WIDTH,
    StateHeader,
    matches_digest,
    sums_of,
    with_digest,
)
from tagc.plan import UnitParam

HEADER = StateHeader(
    policy="p", policy_hash="a" * 64, layout="b" * 64, world_size=1, rank=0, step=3
)
NAME, COUNTERS = "residual.gradients.p", "unit.gradients.u.counters"
TENSORS = {NAME: torch.arange(6.0).view(2, 3), COUNTERS: torch.tensor([3, 2])}
ROW = 4 * WIDTH  # bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_any_tensor_has_a_digest(dtype: torch.dtype) -> None:
    """That of its elements in order, whatever their strides and number."""
    base = torch.arange(24).view(4, 6).to(dtype)
    strided = {
        "one element": base[:1, ::6],
        "one of a column": base[::4, :1].t(),
        "no dimensions": base[2, 3],
        "no elements": base[:0].t(),
        "columns": base.t(),
        "expanded": base[0, :1].expand(5),
    }
    assert strided["one element"].stride(-1) > 1
    for name, tensor in strided.items():
        plain = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
        assert matches_digest(with_digest({}, {name: tensor}), {name: plain})
        if tensor.numel():
            plain.view(-1).view(torch.uint8)[-1] ^= 1
            assert not matches_digest(with_digest({}, {name: tensor}), {name: plain})


def test_every_change_is_found() -> None:
    """Of a name, a dtype, a number of tensors and the metadata; bits are below."""
    metadata = with_digest(HEADER.to_strings(), TENSORS)
    residual, counters = TENSORS.values()
    assert matches_digest(metadata, {COUNTERS: counters, NAME: residual})
    assert not matches_digest(metadata | {"step": "4"}, TENSORS)
    assert not matches_digest(HEADER.to_strings(), TENSORS)
    for changed in (
        {NAME + "q": residual, COUNTERS: counters},
        {NAME: residual.view(torch.int32), COUNTERS: counters},
        {NAME: residual},
    ):
        assert not matches_digest(metadata, changed)


def test_damage_anywhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sums of a damaged row change, and no others; the same in parts of any size."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(256, (2 * ROW + 7,), dtype=torch.uint8, generator=generator)
    before = sums_of(values)
    assert before.shape == (3, 2)
    monkeypatch.setattr(state_format, "_ROWS_ON_CPU", 1)
    assert torch.equal(sums_of(values), before)

    def check(damaged: Tensor, rows: list[bool]) -> None:
        assert (sums_of(damaged) != before).tolist() == [[row, row] for row in rows]

    for place in (0, 3, ROW - 1, ROW, 2 * ROW + 6):
        damaged = values.clone()
        damaged[place] ^= 1 << place % 8
        check(damaged, [place // ROW == row for row in range(3)])
    for start in range(0, 2 * ROW, ROW // 4):
        damaged = values.clone()
        damaged[start : start + 4096] = 0
        check(damaged, [start // ROW == row for row in range(3)])
    check(torch.cat((values[ROW : 2 * ROW], values[:ROW], values[2 * ROW :])), [True, True, False])


# Copies on the host

ROWS, SHAPE, COUNT = 4, (2000, 50), 8
COLUMNS = 25_000
ONE = 4 * ROWS * COLUMNS  # bytes of a tensor


class Device(TorchDispatchMode):
    """Counts the bytes of tensors made on ``meta``, which stands for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.copied = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].device.type == "cpu":
            self.copied += args[0].nbytes
            return args[0]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type == "meta":
            storage = out.untyped_storage()
            given = {a.untyped_storage()._cdata for a in args if torch.is_tensor(a)}
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {at: made for at, made in self._made.items() if not made[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return out


def state_on(device: str, dim: int) -> State:
    """A unit with residuals of several parameters, and a large state besides."""
    shape = SHAPE if dim == 0 else SHAPE[::-1]
    residual = torch.arange(ROWS * COLUMNS * COUNT, dtype=torch.float32, device=device)
    residual = residual.view(ROWS, -1)
    places = [
        ParamLocation(
            param=UnitParam(name=f"p{i}", shape=shape, columns=COLUMNS, dim=dim),
            part=Part(None, None, None),
            pieces=((0, ROWS * COLUMNS, slice(0, ROWS), slice(i * COLUMNS, (i + 1) * COLUMNS)),),
        )
        for i in range(COUNT)
    ]
    copies = {f"copy{i}": torch.ones(ROWS * COLUMNS, device=device) for i in range(COUNT)}
    unit: Any = SimpleNamespace(
        name="unit",
        residuals=lambda: [(p.param.name, p, residual) for p in places],
        reducer=SimpleNamespace(state=lambda: copies),
    )
    plan: Any = None
    return State(plan=plan, groups=(), reduced=[unit], gathered=())


def test_a_device_holds_one_more_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_format, "_ROWS", 1)
    sums_of(torch.zeros(1, device="meta"))  # makes the weights
    for dim in range(2):
        state = state_on("meta", dim)
        with Device() as device:
            copies = state.take()
        assert {tensor.device.type for tensor in copies.tensors.values()} == {"cpu"}
        assert device.copied > 2 * COUNT * ONE
        assert ONE <= device.most < 2 * ONE


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [0, 1])
def test_copies_of_a_gpu(dim: int) -> None:
    found, expected = state_on("cuda", dim).take(), state_on("cpu", dim).take()
    for copies, others in zip(found, expected, strict=True):
        assert list(copies) == list(others)
        for name, tensor in copies.items():
            assert torch.equal(tensor, others[name])
            assert tensor.is_pinned()
