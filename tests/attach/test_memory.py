"""What a plan says about memory: what is stored and buffers are what tensors take, temporary
tensors at least what torch's operations take."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tagc
from support.distributed import as_on_nccl, on_ranks
from support.gathering import INT8
from support.marks import slow
from support.small_net import loss_of
from support.states import POLICIES, run, wrapped
from support.units import codec_plan, matrix_plan, normal, reduce, unit_reducer
from tagc.collect import CopyGatherer, UnitReducer
from tagc.plan import Direction, UnitPlan, buffers_of
from tagc.plan.programs import memory_of

EVERY = tuple(POLICIES)
FEW = (
    "quantized average",
    "matrix lead",
    "sketch shared",
    "parameters",
    "changes",
)


@on_ranks(timeout=200)
@pytest.mark.parametrize(
    ("world_size", "hosts", "gloo", "names"),
    [
        (2, None, True, FEW),
        (4, 2, True, ("changes", "inside")),
        # Without the buffers in which gloo's sums arrive.
        (2, None, False, ("sketch",)),
        slow(4, 2, False, ("sketch",)),
        slow(4, None, False, ("sketch", "warming up")),
        slow(2, None, True, EVERY),
        slow(4, 2, True, ("matrix lead", "sketch", "parameters", "inside warming up")),
    ],
)
def test_a_plan_knows_its_memory(
    rank: int, world_size: int, hosts: int | None, gloo: bool, names: tuple[str, ...]
) -> None:
    """Stored to the byte, buffers by name."""
    with nullcontext() if gloo else as_on_nccl():
        for name in names:
            model = wrapped(POLICIES[name], hosts=hosts)
            compressor = tagc.compressor(model)
            plan = compressor.plan()
            run(model, rank, range(2 + max(unit.warmup_steps for unit in plan.units)))
            with torch.no_grad():  # whose messages are not kept for a backward
                loss_of(model, rank, 9)
            assert plan.memory.stored == stored_bytes(model), name
            assert plan.memory.note in str(plan)
            found = compressor.reducers[0].store.workspace._buffers
            sizes = {(buffer, dtype): t.numel() for (buffer, dtype, _), t in found.items()}
            expected = largest(plan.all_units, gloo)
            assert sizes == expected, (name, sizes.items() ^ expected.items())
            assert plan.memory.buffers == sum(t.nbytes for t in found.values()), name


def largest(units: Iterable[UnitPlan], gloo: bool) -> dict[tuple[str, torch.dtype], int]:
    """Elements of every buffer that the units share."""
    expected: dict[tuple[str, torch.dtype], int] = {}
    for unit in units:
        for buffer, dtype, numel in buffers_of(unit, gloo=gloo):
            expected[buffer, dtype] = max(expected.get((buffer, dtype), 0), numel)
    return expected


@on_ranks(3)
@pytest.mark.parametrize("direction", ["gradients", "replicas"])
@pytest.mark.parametrize("codec", [{"kind": "matrix"}, {"kind": "quantized"}], ids=str)
def test_buffers_of_segments_of_several_sizes(
    rank: int, world_size: int, codec: dict[str, Any], direction: Direction
) -> None:
    """The largest counts, not the last; and a slice of every dtype."""
    feedback = {"kind": "residual", "lead": 0.8}
    plan = matrix_plan(world_size, codec, feedback, torch.bfloat16, direction)
    reducer = unit_reducer(plan)
    reduce(reducer, torch.ones(plan.rows, plan.columns, dtype=torch.bfloat16))
    found = reducer.store.workspace._buffers
    sizes = {(buffer, dtype): t.numel() for (buffer, dtype, _), t in found.items()}
    assert sizes == largest([plan], gloo=True)
    generation = reducer.store.workspace.generation
    reduce(reducer, torch.ones(plan.rows, plan.columns, dtype=torch.bfloat16))
    assert reducer.store.workspace.generation == generation


RESIDUAL = {"kind": "residual"}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (INT8 | {"bits": 4}, RESIDUAL),
    (INT8 | {"bits": 4, "rounding": "stochastic"}, {"kind": "none"}),
    (INT8, RESIDUAL),
    ({"kind": "matrix"}, {"kind": "residual", "lead": 0.8}),
    ({"kind": "sketch", "density": 0.2, "symbol": "int32x1"}, RESIDUAL),
    ({"kind": "dense", "wire": "bfloat16"}, {"kind": "none"}),
]
SLACK = 6000
"""Bytes of counters, thresholds and headers."""


@pytest.mark.some(3)
@on_ranks(2)
@pytest.mark.parametrize(
    ("codec", "feedback", "dtype"),
    [
        param(*case, of)
        for i, case in enumerate(CASES)
        for j, of in enumerate((torch.float32, torch.float16))
        for param in [pytest.param if i % 2 == j else slow]
    ],
    ids=str,
)
def test_a_reduction_takes_no_more(
    rank: int, world_size: int, codec: dict[str, Any], feedback: dict[str, Any], dtype: torch.dtype
) -> None:
    plan = (matrix_plan if codec["kind"] == "matrix" else codec_plan)(
        world_size, codec, feedback, dtype
    )
    reducer = unit_reducer(plan, "cpu")
    buffers = [normal(world_size, plan.columns, step)[rank].to(dtype) for step in range(3)]
    for buffer in buffers:
        taken = peak_of(lambda buffer=buffer: reduce(reducer, buffer))
    # What the test's own function makes: a copy of the buffer, and the shard.
    taken -= (world_size + 1) * plan.columns * dtype.itemsize
    planned = memory_of([plan], gloo=True).moment
    assert taken <= planned + SLACK, (taken, planned)
    # The compiled kernels' own scratch is not torch's.
    messages = plan.messages
    unseen = max(s.codec.scratch_bytes(messages.made, messages.read) for s in plan.segments)
    assert planned - unseen <= 2.2 * taken + SLACK, (taken, planned)


@on_ranks(4)
@pytest.mark.parametrize("policy", [slow("hosts"), slow("thrifty"), "hosts, inside"])
def test_the_peak_is_within_a_tenth(rank: int, world_size: int, policy: str) -> None:
    """Of what a rank needs for gradients and parameters on two hosts, in the policies made for
    them: what is stored, buffers, and the most that any exchange makes besides."""
    model = nn.Sequential(*(block() for _ in range(2)))
    for part in (*model, model):
        fully_shard(part)
    name, comma, _ = policy.partition(",")
    chosen = {"schema": 1, "extends": name, "inside": "int8" if comma else "native"}
    taken: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, UnitReducer, "reduce", taken)
        watch(patch, CopyGatherer, "gather", taken)
        tagc.wrap(model, chosen, hosts=2, ops="cpu")
        for step in range(3):
            taken.clear()
            model(normal(world_size, WIDTH, step)[rank]).square().mean().backward()
    compressor = tagc.compressor(model)
    buffers = compressor.reducers[0].store.workspace._buffers.values()
    measured = stored_bytes(model) + sum(t.nbytes for t in buffers) + max(taken)
    planned = compressor.plan().memory.peak
    assert 0.9 < planned / measured < 1.1


WIDTH = 256


def block() -> nn.Module:
    """Two matrices that roles know."""
    module = nn.Module()
    module.up_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
    module.down_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)
    module.forward = lambda x: module.down_proj(module.up_proj(x))  # type: ignore[method-assign]
    return module


def watch(patch: pytest.MonkeyPatch, owner: type, name: str, taken: list[int]) -> None:
    """Note what calls of a method make."""
    method = getattr(owner, name)

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        answers: list[Any] = []
        taken.append(peak_of(lambda: answers.append(method(self, *args, **options))))
        return answers[0]

    patch.setattr(owner, name, watched)


class LiveBytes(TorchDispatchMode):
    """Inside, count the storages that operations make, until nothing holds them.

    Attributes:
        peak: the most bytes alive at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._held: dict[int, list[int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, Tensor):
                continue
            key = _storage(t)
            if key in given and key not in self._held:
                continue  # a view of an older storage
            if key not in self._held:
                self._held[key] = [0, t.untyped_storage().nbytes()]
                self._now += self._held[key][1]
                self.peak = max(self.peak, self._now)
            self._held[key][0] += 1
            weakref.finalize(t, self._drop, key)
        return out

    def _drop(self, key: int) -> None:
        self._held[key][0] -= 1
        if not self._held[key][0]:
            self._now -= self._held.pop(key)[1]


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def peak_of(call: Any) -> int:
    """Peak bytes of a call's tensors."""
    with torch.no_grad(), LiveBytes() as live:
        call()
    return live.peak


def stored_bytes(model: Any) -> int:
    """Bytes of all tensors that a rank keeps between steps and that the plan counts."""
    compressor = tagc.compressor(model)
    total = 0
    for reducer in (*compressor.reducers, *compressor.replica_reducers):
        for stored in (reducer.residuals, reducer.owner_residuals, reducer.owner_states):
            total += sum(tensor.nbytes for tensor in stored.values())
    for gatherer in compressor.gatherers:
        total += sum(t.nbytes for name, t in gatherer.store if name in ("copy", "kept_message"))
    return total
