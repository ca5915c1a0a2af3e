"""Measures the RMS of a unit's decoded gradients relative to the dense gradient.

Adam divides by the RMS of gradients, so the codecs' noise makes its steps smaller, by the factor
``f``: the RMS of the decoded gradient over that of the dense gradient. No rank has the dense
gradient. But every rank contributes the same part of its mean square on average, so the owner of a
shard can estimate it from its own gradient ``g`` and from the decoded result ``h``, if ``h``
contains the step's whole gradient and the noise is independent of ``g``::

    1 / f^2 = E[g h] / E[h h]        for averages; for sums over W ranks W E[g h] / E[h h]

Both means are over a sample of the elements, a different one in every step. The ratio, not each
mean, is averaged over steps: gradients may fall by a factor of 20 in the first steps, and large
early means would dominate for long.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor

from tagc.codecs.state import MAX_COUNT
from tagc.plan import UnitPlan

SAMPLE = 4096
"""The most elements of a segment that a step samples."""
DECAY = 0.95
"""Weight of older measurements in the moving average, which spans about 20 of them."""
FIRST, EVERY = 32, 4
"""The first ``FIRST`` steps are all measured, then one step in ``EVERY``."""


class NoiseGauge:
    """The noise in one unit's compressed segments on one rank.

    Attributes:
        sums: float64 ``[segments, 2]``: the total weight of the measured steps, which rises from 0
            towards 1, and the weighted sum of their ``1 / f^2``.
        agreed: the same over all ranks, as of the last exchange; on the CPU.
        agreed_at: the number of reductions at that exchange; int64 ``[]``.
    """

    def __init__(self, plan: UnitPlan, device: torch.device) -> None:
        self._segments = [(s.start, s.stop) for s in plan.compressed]
        self.sums = torch.zeros(len(self._segments), 2, dtype=torch.float64, device=device)
        self.agreed = torch.zeros(len(self._segments), 2, dtype=torch.float64, device="cpu")
        self.agreed_at = torch.zeros((), dtype=torch.int64, device="cpu")
        self._own: list[Tensor] = []

    def look(self, gradient: Tensor, step: int) -> None:
        """Before a reduction: keep a sample of this rank's own gradient ``[S]``."""
        if step < FIRST or step % EVERY == 0:
            self._own = [part.double() for part in self._sampled(gradient, step)]

    def compare(self, out: Tensor, step: int, scale: float) -> None:
        """After a reduction: compare the sample with the result.

        Args:
            out: the decoded gradient, ``[S]``.
            scale: the number of ranks over the divisor of their sum.
        """
        if not self._own:
            return
        handed = (part.double() for part in self._sampled(out, step))
        shares = [
            (g * h).sum() * scale / (h * h).sum() for g, h in zip(self._own, handed, strict=True)
        ]
        self._own = []
        share = torch.stack(shares)
        new = torch.stack((torch.ones_like(share), share), dim=1)
        # Users see non-finite values in the gradient; here they (or 0 / 0) would stay for ever.
        usable = share.isfinite()[:, None]
        # In place, because FSDP's stream may still use a tensor that is freed here.
        torch.where(usable, self.sums * DECAY + new * (1 - DECAY), self.sums, out=self.sums)

    def state(self) -> dict[str, Tensor]:
        """The measurements, by name."""
        # Errors about a state name the first of these.
        return {"noise": self.sums, "noise.agreed": self.agreed, "noise.agreed_at": self.agreed_at}

    @staticmethod
    def in_state(state: Container[str]) -> bool:
        """Whether the names of a unit's state include a gauge's."""
        return "noise" in state

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never returns."""
        if bool((state["noise"][:, 0] < 0).any() | (state["noise.agreed"][:, 0] < 0).any()):
            raise ValueError("a weight of measured noise is negative")
        if not 0 <= int(state["noise.agreed_at"]) <= MAX_COUNT:
            raise ValueError("the count of reductions at the exchange of noise is out of range")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a :meth:`state`."""
        self.sums.copy_(state["noise"])
        self.agreed.copy_(state["noise.agreed"])
        self.agreed_at.copy_(state["noise.agreed_at"])

    def _sampled(self, row: Tensor, step: int) -> list[Tensor]:
        found = []
        for start, stop in self._segments:
            stride = -(-(stop - start) // SAMPLE)
            # Different elements in every step; the order repeats only after all of them.
            offset = step * 0x9E3779B1 % stride
            found.append(row[start + offset : stop : stride])
        return found


def noise_factor(sums: Tensor) -> float:
    """``f`` from a row of sums ``[2]`` on the CPU, clamped to between 1/2 and 32; 1 if nothing was
    measured."""
    weight, shares = sums.tolist()
    if weight <= 0:
        return 1.0
    return min(32.0, max(0.5, (weight / max(shares, weight / 1024)) ** 0.5))
