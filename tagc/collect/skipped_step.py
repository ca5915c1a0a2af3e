"""Copies the reducers' state before a step, and restores it if the optimizer skips the step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from tagc.collect.reducer import UnitReducer


def copy_step_state(reducers: Sequence[UnitReducer]) -> list[Tensor]:
    """Copy residuals, owner states, and the state of codecs and measured shares."""
    return [tensor.clone() for reducer in reducers for tensor in reducer.step_tensors()]


def restore_step_state(
    reducers: Sequence[UnitReducer], copy: Sequence[Tensor], where: bool | Tensor
) -> None:
    now = [reducer.step_tensors() for reducer in reducers]
    if [t.shape for tensors in now for t in tensors] != [t.shape for t in copy]:
        raise ValueError("the copy was not taken from this model under this plan")
    kept = iter(copy)
    for reducer, tensors in zip(reducers, now, strict=True):
        reducer.restore_step(list(islice(kept, len(tensors))), where)
