"""What a plan says about memory for a moment is at least what torch's operations take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import tagc
from support.distributed import on_ranks
from support.gathering import INT8
from support.launching import launch
from support.live_bytes import peak_of, stored_bytes
from support.marks import slow
from support.units import codec_plan, matrix_plan, normal, reduce, unit_reducer
from tagc.codecs import PlanRequest, plan_codec
from tagc.codecs.dense import DenseConfig
from tagc.collect import CopyGatherer, UnitReducer
from tagc.ops.launches import Sum
from tagc.plan.memory import memory_of

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
    said = memory_of([plan], gloo=True).moment
    assert taken <= said + SLACK, (taken, said)
    # The compiled kernels' own scratch is not torch's.
    messages = plan.messages
    unseen = max(s.codec.scratch_bytes(messages.made, messages.read) for s in plan.segments)
    assert said - unseen <= 2.2 * taken + SLACK, (taken, said)


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
    said = compressor.plan().memory.peak
    assert 0.9 < said / measured < 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_inside_a_host_take_no_more(dtype: torch.dtype) -> None:
    """Of five hosts of three ranks. (What torch widens it does not tell.)"""
    plan = plan_codec(DenseConfig(), PlanRequest(columns=1000, world_size=3, dtype=dtype))
    sums = Sum(1000, dtype, divisor=1)
    received = torch.zeros(3, 5, plan.words, dtype=torch.int32)
    rows = torch.empty(5, 1000, dtype=dtype)
    taken = peak_of(lambda: launch(sums, received, rows))
    assert taken + plan.widened_bytes(15) == plan.sums_bytes(5, 3)


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
