"""Copies the reducers' state before a step, and restores it if the optimizer skips the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from tagc.codecs.feedback import MeasuredShare
from tagc.collect.counters import Stateful
from tagc.collect.reducer import UnitReducer


def copy_step_state(reducers: Sequence[UnitReducer]) -> list[Tensor]:
    """Copy residuals and owner states, then the state of codecs and measured shares."""
    copies = [
        stored.clone()
        for reducer in reducers
        for stored in (
            *reducer.residuals.values(),
            *reducer.owner_residuals.values(),
            *reducer.owner_states.values(),
        )
    ]
    return copies + [t.clone() for part in _parts(reducers) for t in part.state().values()]


def restore_step_state(
    reducers: Sequence[UnitReducer], copy: Sequence[Tensor], where: bool | Tensor
) -> None:
    states = [part.state() for part in _parts(reducers)]
    with _opened(reducers) as residuals:
        now = [*residuals, *(t for state in states for t in state.values())]
        if [t.shape for t in now] != [c.shape for c in copy]:
            raise ValueError("the copy was not taken from this model under this plan")
        for residual, before in zip(residuals, copy, strict=False):
            if isinstance(where, Tensor):
                flag = where.to(residual.device, torch.bool)
                residual.copy_(torch.where(flag, before, residual))
            elif where:
                residual.copy_(before)
    saved = iter(copy[len(residuals) :])
    for part, state in zip(_parts(reducers), states, strict=True):
        before = {name: next(saved) for name in state}
        if not isinstance(where, Tensor):
            if where:
                # Totals count every group that was sent, even in a skipped step.
                kept = {name: state[name] for name in ("totals",) if name in state}
                part.load_state(before | kept)
        elif isinstance(part, MeasuredShare):
            part.restore(before["sums"], where)
        # Other parts count on the host; their tensors alone, restored by a flag on the device,
        # would no longer match those counts.


def _parts(reducers: Sequence[UnitReducer]) -> Iterator[Stateful]:
    return (part for reducer in reducers for _, part in reducer.memory())


@contextmanager
def _opened(reducers: Sequence[UnitReducer]) -> Iterator[list[Tensor]]:
    with ExitStack() as stack:
        yield [
            stored
            for reducer in reducers
            for stored in (
                *stack.enter_context(reducer.open_residuals()).values(),
                *stack.enter_context(reducer.open_owner_residuals()).values(),
                *reducer.owner_states.values(),
            )
        ]
