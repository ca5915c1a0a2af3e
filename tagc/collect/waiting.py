"""Gradients of micro-batches that wait until a later backward sends them."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.plan import UnitPlan
from tagc.plan.part import Part


class Waiting:
    """The sum of one unit's gradients, in the plan's columns, over the micro-batches that stay
    inside a host or in one replica (``set_requires_all_reduce(False)``)."""

    def __init__(self, unit: UnitPlan, dtype: torch.dtype | None = None) -> None:
        """``dtype`` is that of the sum; by default the gradients'."""
        self._unit, self._dtype = unit, dtype
        self._sum: Tensor | None = None
        # Names of the parameters that backwards reached since.
        self._reached: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return self._sum is not None

    def add(self, total: Tensor, part: Part | None = None) -> None:
        """Add ``total`` ``[..., S]`` to the waiting sum. It is zero outside the ``part`` that the
        backward reached."""
        if self._sum is None:
            self._sum = total.to(self._dtype or total.dtype, copy=True)
        else:
            self._sum.add_(total)
        self._reached |= self._names(part)

    def hand_over(self, total: Tensor, part: Part | None = None) -> None:
        """Move the waiting sum of the parameters in ``part``, or of all, into ``total``
        ``[..., S]``. The sums of other parameters keep waiting."""
        if self._sum is None:
            return
        self._sum.add_(total)
        total.copy_(self._sum)
        left = self._reached - self._names(part)
        if part is None or not left:
            self.drop()
            return
        for run in part.missing_runs:
            total[..., run] = 0
        for run in part.runs:
            self._sum[..., run] = 0
        self._reached = left

    def check_between_steps(self) -> None:
        """Raise RuntimeError if a micro-batch's gradient waits; no saved state contains it."""
        if self:
            raise RuntimeError(
                f"tagc: unit {self._unit.info.label!r} holds gradients of micro-batches that wait "
                "for the last one (set_requires_all_reduce(False)), and these are not saved; save "
                "after the optimizer's step, or call tagc.compressor(model).drop_waiting()"
            )

    def drop(self) -> None:
        self._sum, self._reached = None, frozenset()

    def _names(self, part: Part | None) -> frozenset[str]:
        return frozenset(p.name for p in self._unit.info.params) if part is None else part.names
