"""Launches operators of programs on tensors, and reads a reducer's tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tagc.collect import UnitReducer
from tagc.collect.transport import CollectiveWork, SilentTransport
from tagc.ops import get_ops
from tagc.ops.program import Operator
from tagc.ops.thresholds import BOOST, STEP, THRESHOLD
from tagc.plan import UnitPlan
from tagc.plan.part import Part


def launch(
    operator: Operator, *tensors: Tensor | None, ops: str = "reference", own: int = 0
) -> None:
    """Run an operator as a replay does."""
    adapted = [None if t is None else operator.adapted(i, t) for i, t in enumerate(tensors)]
    operator.bound(get_ops(torch.device("cpu"), ops), own)(*adapted)


def sketch_of(reducer: UnitReducer) -> Any:
    """The live state of a unit's sketches: threshold, boost, step, seed; supports by number."""
    sketches = reducer.programs.sketches
    assert sketches is not None
    state = reducer.store[sketches.controller]
    return SimpleNamespace(
        threshold=state[THRESHOLD],
        boost=state[BOOST],
        step=state[STEP],
        seed=reducer.store[sketches.seed],
        supports={i: reducer.store[s.current] for i, s in sketches.supports.items()},
    )


def missing_mask(plan: UnitPlan, reached: set[str]) -> Tensor:
    """``[S]`` boolean, true in the columns of parameters that were not reached."""
    mask = torch.zeros(plan.columns, dtype=torch.bool)
    for run in Part(plan, frozenset(reached)).missing_runs:
        mask[run] = True
    return mask


class Echo(SilentTransport):
    """The transport of a rank that hears what it says: all other ranks send the same."""

    def all_to_all(
        self, out: Tensor, inp: Tensor, columns: Any = None, *, in_flight: bool = False
    ) -> CollectiveWork:
        out.copy_(inp)
        return super().all_to_all(out, inp, columns)

    def sum_each(self, out: Tensor, inp: Tensor, scratch: Tensor) -> CollectiveWork:
        torch.sum(inp, 1, dtype=out.dtype, out=out)
        return super().sum_each(out, inp, scratch)

    def gather(self, out: Tensor, inp: Tensor, *, in_flight: bool = False) -> CollectiveWork:
        out.copy_(inp.expand_as(out))
        return super().gather(out, inp)
