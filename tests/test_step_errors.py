"""What a wrapped model refuses in a step, on every rank alike, and non-finite gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.nn.parallel import DistributedDataParallel

import tagc
from support import fsdp1_net, small_net
from support.distributed import on_ranks
from support.failing import fails
from support.launching import sketch_of
from support.marks import covering, slow
from support.units import normal, reduce, unit_plan, unit_reducer


def replicated() -> Any:
    model = small_net.net()
    for module in (model.first, model.second, model):
        replicate(module)
    return model


SHARDED: dict[str, Callable[[], Any]] = {
    "FSDP2": small_net.sharded,
    "FSDP1": lambda: fsdp1_net.sharded(use_orig_params=True),
    "DDP": lambda: DistributedDataParallel(small_net.net()),
    "replicate": replicated,
}


def frozen(api: str) -> tuple[Any, list[nn.Parameter]]:
    """A model and its parameters of the first layer, which are frozen."""
    model = small_net.net()
    model.first[0].requires_grad_(False)
    with (
        patch.object(small_net, "net", lambda: model),
        patch.object(fsdp1_net, "net", lambda: model),
    ):
        whole = SHARDED[api]()
    return whole, [p for n, p in whole.named_parameters() if not p.requires_grad]


SECOND = {"when": {"name": "second.*"}, "codec": {"kind": "quantized"}}


@on_ranks(2)
@pytest.mark.parametrize("api", SHARDED)
@pytest.mark.parametrize("change", ["unfrozen", "added"])
def test_parameters_that_the_plan_does_not_know(
    rank: int, world_size: int, api: str, change: str
) -> None:
    """No unit that compresses has anything to do with them."""
    model, parameters = frozen(api)
    assert len(parameters) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # units as small as these may send more when compressed
        tagc.wrap(model, {"schema": 1, "gradients": [SECOND]})
    inner: Any = model.module if api == "DDP" else model
    inner.note = nn.Linear(2, 2).requires_grad_(False)
    small_net.loss_of(model, rank, 0).backward()
    if change == "added":
        inner.extra = nn.Linear(11, 1)
    else:
        parameters[0].requires_grad_(True)
    kind, said = fails(lambda: small_net.loss_of(model, rank, 1).backward())
    assert kind == "RuntimeError", said
    assert ("first.0.weight" if change == "unfrozen" else "extra.weight") in said
    assert "plan does not know them" in said


@on_ranks(2, slow(3))
@pytest.mark.parametrize(
    ("bad", "first", "ops"),
    covering([float("nan"), float("inf"), float("-inf")], [0, 2], ["cpu", "reference"]),
)
def test_non_finite_gradients(rank: int, world_size: int, bad: float, first: int, ops: str) -> None:
    """One bad element on rank 0 for the last rank: it comes out there, at once, and only then.

    `first` is the step with the bad element; in step 0 thresholds are sampled from it."""
    plan = unit_plan(world_size)
    reducer = unit_reducer(plan, ops)
    owner = world_size - 1
    for segment in plan.segments:
        start = reducer.counters.steps + first
        for step in range(start + 3):
            buffers = normal(world_size, plan.columns, step)
            if step == start:
                buffers[0, owner, segment.start + 4] = bad
            out = reduce(reducer, buffers[rank])
            hit = step == start and rank == owner
            for other in plan.segments:
                finite = out[other.start : other.stop].isfinite()
                assert finite.all() != (hit and other is segment)
            assert all(r.isfinite().all() for r in reducer.residuals.values())
            assert sketch_of(reducer).threshold.isfinite().all()
        reducer = unit_reducer(plan, ops)
