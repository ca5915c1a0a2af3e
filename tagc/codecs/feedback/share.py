"""Measures the share of gradient plus residual that a rank's messages carry."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tagc.codecs.state import MAX_COUNT

SAMPLE = 4096
"""Elements that a measurement samples."""
DECAY = 0.9
"""Weight of the old value in the moving averages: they reach back by 10 measurements."""
FIRST, EVERY = 32, 8
"""The first ``FIRST`` steps are all measured, then one in ``EVERY``: the share changes in the first
steps, while residuals fill."""


class MeasuredShare:
    """The slope of the regression of what is sent on gradient plus residual, over the last steps.

    Attributes:
        value: ``[]`` float32; 1 while all measured gradients and residuals are zero.
        updates: how often ``value`` was written.
    """

    def __init__(self, device: torch.device) -> None:
        # Moving averages of sent * owed and owed * owed; zero before the first step.
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._steps = self.updates = 0
        self._owed: Tensor | None = None
        self.value = torch.ones((), dtype=torch.float32, device=device)

    def before(self, gradient: Tensor, residual: Tensor) -> None:
        """Sample ``gradient + residual``, both ``[D, columns]``, before a step."""
        if self._steps < FIRST or self._steps % EVERY == 0:
            self._owed = self._sampled(gradient).double().add_(self._sampled(residual))

    def after(self, residual: Tensor) -> None:
        """Measure after the step. ``residual`` now has what was not sent of the same elements."""
        if self._owed is not None:
            self._learn(residual, self._owed)
        self._owed = None
        self._steps += 1

    def _learn(self, residual: Tensor, owed: Tensor) -> None:
        sent = owed - self._sampled(residual)
        new = torch.stack(((sent * owed).sum(), owed.square().sum()))
        # Values that are not finite were not sent, and would stay in the averages for ever.
        usable = new.isfinite().all()
        # In place, as everywhere here: FSDP's stream may still use a tensor that is released.
        learnt = self._sums * DECAY + new * (1 - DECAY)
        torch.where(usable, learnt, self._sums, out=self._sums)
        self._update()

    def _update(self) -> None:
        sent, owed = self._sums
        self.value.copy_(torch.where(owed > 0, sent / owed, 1.0))
        self.updates += 1

    def rescale(self, factor: float | Tensor) -> None:
        """Rescale the averages for gradients that are ``factor`` times as large."""
        self._sums.mul_(factor).mul_(factor)

    def state(self) -> dict[str, Tensor]:
        """The state that the next step depends on."""
        return {
            "sums": self._sums,
            "steps": torch.tensor(self._steps, dtype=torch.int64, device="cpu"),
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never has."""
        if not 0 <= int(state["steps"]) <= MAX_COUNT:
            raise ValueError("a count of encodings is negative, or larger than any run is long")
        if float(state["sums"][1]) < 0:
            raise ValueError("the mean square of gradient plus residual is negative")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a :meth:`state` that passed :meth:`check_state`."""
        self._sums.copy_(state["sums"])
        self._steps = int(state["steps"])
        self._update()

    def restore(self, sums: Tensor, where: Tensor) -> None:
        """Go back to the ``sums`` of :meth:`state` if ``where`` ``[]`` is true, without waiting for
        its value. The count of steps stays: it only says when to measure, and which elements."""
        flag = where.to(self._sums.device, torch.bool)
        torch.where(flag, sums, self._sums, out=self._sums)
        self._update()

    def _sampled(self, rows: Tensor) -> Tensor:
        columns = rows.shape[1]
        stride = max(1, min(columns, -(-rows.numel() // SAMPLE)))
        # Other elements in every step; the order repeats only after all of them.
        return rows[:, self._steps * 0x9E3779B1 % stride :: stride].flatten()
