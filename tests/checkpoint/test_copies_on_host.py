"""A state is copied to the host tensor by tensor: the device holds one more tensor at most."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tagc.checkpoint import State
from tagc.checkpoint.locations import ParamLocation
from tagc.checkpoint.sums import sums_of
from tagc.plan import UnitParam

ROWS, SHAPE, TENSORS = 4, (2000, 50), 8
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
            assert args[1].device.type == "meta"
            self.copied += args[0].nbytes
            return args[0]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type == "meta":
            storage = out.untyped_storage()
            if all(
                a.untyped_storage()._cdata != storage._cdata for a in args if torch.is_tensor(a)
            ):
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {at: made for at, made in self._made.items() if not made[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return out


def unit(dim: int, device: str) -> Any:
    """A unit with residuals of several parameters, and a large state besides."""
    shape = SHAPE if dim == 0 else SHAPE[::-1]
    params = [
        UnitParam(name=f"p{i}", shape=shape, columns=COLUMNS, dim=dim) for i in range(TENSORS)
    ]
    residual = torch.arange(ROWS * COLUMNS * TENSORS, dtype=torch.float32, device=device)
    residual = residual.view(ROWS, -1)
    places = [
        ParamLocation(param=p, start=i * COLUMNS, shards=ROWS, ranks=1)
        for i, p in enumerate(params)
    ]
    copies = {f"copy{i}": torch.ones(ROWS * COLUMNS, device=device) for i in range(TENSORS)}
    return SimpleNamespace(
        name="unit",
        residuals=lambda: [(p.param.name, p, residual) for p in places],
        reducer=SimpleNamespace(state=lambda *, noise: copies),
    )


def state_on(device: str, dim: int) -> State:
    plan: Any = None
    return State(plan=plan, groups=(), reduced=[unit(dim, device)], gathered=())


def test_a_device_holds_one_more_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tagc.checkpoint.sums._ROWS", 1)
    sums_of(torch.zeros(1, device="meta"))  # makes the weights
    for dim in range(2):
        state = state_on("meta", dim)
        with Device() as device:
            copies = state.take()
        assert {tensor.device.type for tensor in copies.tensors.values()} == {"cpu"}
        assert device.copied > 2 * TENSORS * ONE
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
