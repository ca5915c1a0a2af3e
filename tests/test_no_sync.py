"""A step of the reducer never waits for the device: not for a value, not for a copy.

On ``meta`` tensors, which have no values to wait for, everything but the operators and the
collectives; on a GPU (``-m gpu``) all of it, with NCCL and a single rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.exact import EXACT
from support.units import AVG, codec_plan, normal, unit_plan
from tagc.codecs.workspace import Workspace
from tagc.collect import UnitReducer, transport
from tagc.ops import get_ops

META = torch.device("meta")


@contextmanager
def synchronizing_raises() -> Iterator[None]:
    """Inside, torch raises if the host would wait for the device (except for some operations)."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # It warns once that it is a prototype; warnings are errors here.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class OnDevice(TorchDispatchMode):
    """Every tensor of every operation must be on the device: a copy to or from it may wait."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations.append(str(func))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor):
                assert leaf.device == META, f"{func} with a tensor on {leaf.device}"
        return out


class Nothing:
    """A group of two, its collectives in flight, and operators: all without an effect.

    Attributes:
        operators: names of those that were called, or prepared.
    """

    def __init__(self) -> None:
        self.operators: set[str] = set()

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def wait(self) -> None: ...

    def __getattr__(self, operator: str) -> Callable[..., None]:
        self.operators.add(operator)
        return lambda *tensors, **sizes: None


@pytest.fixture
def without_ranks():
    def start(*args: Any, **options: Any) -> Nothing:
        return Nothing()

    with (
        mock.patch.multiple(dist, all_to_all_single=start, all_reduce=start),
        mock.patch.multiple(transport, reduce_scatter=start, all_gather=start),
        mock.patch.object(transport, "_is_gloo", return_value=False),
    ):
        yield Nothing()


PLANS = {
    "int8x4": lambda: unit_plan(2, symbol="int8x4"),
    "quantized": lambda: codec_plan(2, {"kind": "quantized"}, {"kind": "average"}),
    "shared sketch": lambda: codec_plan(
        2, {"kind": "sketch", "density": 0.9, "symbol": "int8x4", "support": "shared"}
    ),
    "bfloat16": lambda: codec_plan(2, {"kind": "dense", "wire": "bfloat16"}),
}


@pytest.mark.parametrize("codec", PLANS)
def test_no_value_of_a_tensor_is_operators(without_ranks, codec):
    nothing: Any = without_ranks
    plan = PLANS[codec]()
    reducer = UnitReducer(plan, nothing, META, Workspace(META), seed=7)
    out, inp = torch.empty(plan.columns, device=META), torch.empty(2 * plan.columns, device=META)
    for _ in range(3):
        with OnDevice() as seen:
            reducer.reduce(out, inp, nothing, AVG)
        assert seen.operations
    assert ("steer" in nothing.operators) == (codec not in ("quantized", "bfloat16"))


def shards(device: torch.device, ops: str) -> list[Tensor]:
    """What a single rank gets in five steps; all but the first, which compiles, are guarded."""
    plan = unit_plan(1, symbol="int8x4", stored="bfloat16")
    reducer = UnitReducer(plan, get_ops(device, ops), device, Workspace(device), seed=7)
    group = dist.group.WORLD
    assert group is not None
    found = []
    for step in range(5):
        inp = normal(1, plan.columns, step)[0].to(device)
        out = torch.full((plan.columns,), torch.nan, device=device)
        with synchronizing_raises() if step and device.type == "cuda" else nullcontext():
            reducer.reduce(out, inp.view(-1), group, AVG)
        found.append(out.cpu())
    return found


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        got = shards(torch.device("cuda", torch.cuda.current_device()), "triton")
        torch.testing.assert_close(got, shards(torch.device("cpu"), "reference"), **EXACT)
    finally:
        dist.destroy_process_group()
    assert not any(out.isnan().any() for out in got)
