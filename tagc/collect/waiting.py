"""Gradients of micro-batches that wait for the backward which sends them further."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.collect.part import Part
from tagc.plan import UnitPlan


class Waiting:
    """The sum of one unit's gradients, in the plan's columns, over the micro-batches that
    ``set_requires_all_reduce(False)`` keeps inside a host, or in one replica."""

    def __init__(self, unit: UnitPlan, dtype: torch.dtype | None = None) -> None:
        """Nothing waits.

        Args:
            dtype: of the sum; by default that of the gradients.
        """
        self._unit, self._dtype = unit, dtype
        self._sum: Tensor | None = None
        # Names of parameters that a backward reached.
        self._reached: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return self._sum is not None

    def add(self, total: Tensor, part: Part | None = None) -> None:
        """Let ``total`` ``[..., S]`` wait, too.

        Args:
            part: what the backward reached, if not all: ``total`` is zero in other columns.
        """
        if self._sum is None:
            self._sum = total.to(self._dtype or total.dtype, copy=True)
        else:
            self._sum.add_(total)
        self._reached |= self._names(part)

    def hand_over(self, total: Tensor, part: Part | None = None) -> None:
        """Add to ``total`` ``[..., S]`` what waits for the parameters of ``part``, or for all. What
        waits for others goes on waiting."""
        if self._sum is None:
            return
        self._sum.add_(total)
        total.copy_(self._sum)
        left = self._reached - self._names(part)
        if part is None or not left:
            self.drop()
            return
        missing = part.missing_mask(total.device)
        total.masked_fill_(missing, 0)
        self._sum.masked_fill_(~missing, 0)
        self._reached = left

    def check_between_steps(self) -> None:
        """Raise RuntimeError if the gradient of a micro-batch waits, which no state has."""
        if self:
            raise RuntimeError(
                f"tagc: unit {self._unit.info.label!r} holds gradients of micro-batches that wait "
                "for the last one (set_requires_all_reduce(False)), which no state has; save after "
                "the optimizer's step, or call tagc.compressor(model).drop_waiting()"
            )

    def drop(self) -> None:
        """Forget what waits."""
        self._sum, self._reached = None, frozenset()

    def _names(self, part: Part | None) -> frozenset[str]:
        return frozenset(p.name for p in self._unit.info.params) if part is None else part.names
