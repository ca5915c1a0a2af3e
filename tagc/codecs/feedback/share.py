"""The share of what a rank owes that its messages carry, measured."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tagc.codecs.state import MAX_COUNT

SAMPLE = 4096
"""Elements that are looked at in a step."""
DECAY = 0.9
"""Share of the older ones in the moving averages: they reach back by 10 measurements."""
FIRST, EVERY = 32, 8
"""Steps that are all measured, and of how many later ones one is: what a codec carries changes in
the first steps, while residuals fill."""


class MeasuredShare:
    """The slope of what is sent on what is owed, over the last steps.

    Attributes:
        value: ``[]`` float32; 1 before anything was owed.
        updates: how often it was written.
    """

    def __init__(self, device: torch.device) -> None:
        # Moving averages of sent * owed and owed * owed; zeros before the first step.
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._steps = self.updates = 0
        self._owed: Tensor | None = None
        self.value = torch.ones((), dtype=torch.float32, device=device)

    def before(self, gradient: Tensor, residual: Tensor) -> None:
        """Look at what is owed before a step: ``gradient + residual``, both ``[D, columns]``."""
        if self._steps < FIRST or self._steps % EVERY == 0:
            self._owed = self._sampled(gradient).double().add_(self._sampled(residual))

    def after(self, residual: Tensor) -> None:
        """After the step: what is left of the same elements is in ``residual``."""
        if self._owed is not None:
            self._learn(residual, self._owed)
        self._owed = None
        self._steps += 1

    def _learn(self, residual: Tensor, owed: Tensor) -> None:
        sent = owed - self._sampled(residual)
        new = torch.stack(((sent * owed).sum(), owed.square().sum()))
        # What is not finite was not sent, and would stay here for ever.
        usable = new.isfinite().all()
        # In place, as everywhere here: FSDP's stream may still work with a tensor that is let go.
        learnt = self._sums * DECAY + new * (1 - DECAY)
        torch.where(usable, learnt, self._sums, out=self._sums)
        self._update()

    def _update(self) -> None:
        sent, owed = self._sums
        self.value.copy_(torch.where(owed > 0, sent / owed, 1.0))
        self.updates += 1

    def rescale(self, factor: float | Tensor) -> None:
        """Expect gradients that are ``factor`` times as large."""
        self._sums.mul_(factor).mul_(factor)

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on."""
        return {
            "sums": self._sums,
            "steps": torch.tensor(self._steps, dtype=torch.int64, device="cpu"),
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never has."""
        if not 0 <= int(state["steps"]) <= MAX_COUNT:
            raise ValueError("a count of encodings is negative, or larger than any run is long")
        if float(state["sums"][1]) < 0:
            raise ValueError("the mean square of what is owed is negative")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken, given that it passes the check."""
        self._sums.copy_(state["sums"])
        self._steps = int(state["steps"])
        self._update()

    def restore(self, sums: Tensor, where: Tensor) -> None:
        """Go back to ``sums`` of :meth:`state` if ``where`` ``[]`` is true, which is not looked at.
        The count of steps stays: it only says which elements are looked at."""
        flag = where.to(self._sums.device, torch.bool)
        torch.where(flag, sums, self._sums, out=self._sums)
        self._update()

    def _sampled(self, rows: Tensor) -> Tensor:
        columns = rows.shape[1]
        stride = max(1, min(columns, -(-rows.numel() // SAMPLE)))
        # Other elements in every step, in an order that repeats after all of them only.
        return rows[:, self._steps * 0x9E3779B1 % stride :: stride].flatten()
