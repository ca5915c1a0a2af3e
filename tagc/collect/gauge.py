"""How much larger the gradients of a unit come out of its codecs than they would densely.

An optimizer that divides by the root of a gradient's mean square (Adam) answers the codecs' noise
with smaller steps: by ``f``, the root mean square of what is handed out over that of the dense
gradient. Nobody has the dense gradient. But in its mean square every rank has the same part on
average, so the owner of a shard, who is one of the ranks, can tell it from its own gradient ``g``
and from what it hands out, ``h``, as long as all of a step's gradient is in ``h`` and the noise
knows nothing of ``g``::

    1 / f^2 = E[g h] / E[h h]        of averages; of sums over W ranks W E[g h] / E[h h]

Both means are over a sample of the elements, other ones in every step. Over steps their ratio is
averaged: gradients may fall by a factor of 20 in the first ones, which would otherwise be all that
counts for long.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor

from tagc.codecs.state import MAX_COUNT
from tagc.plan import UnitPlan

SAMPLE = 4096
"""Elements of a segment that are looked at in a step."""
DECAY = 0.95
"""Share of the older ones in the moving average: it reaches back by 20 measurements."""
FIRST, EVERY = 32, 4
"""Steps that are all measured, and of how many later ones one is."""


class NoiseGauge:
    """The noise in one unit's compressed segments on one rank.

    Attributes:
        sums: float64 ``[segments, 2]``: weight of the steps that were measured, below 1 for the
            first ones, and their ``1 / f^2``, weighted likewise.
        agreed: likewise, but over all ranks, as of the last exchange; on the CPU.
        agreed_at: reductions after which that was; int64 ``[]``.
    """

    def __init__(self, plan: UnitPlan, device: torch.device) -> None:
        self._segments = [(s.start, s.stop) for s in plan.compressed]
        self.sums = torch.zeros(len(self._segments), 2, dtype=torch.float64, device=device)
        self.agreed = torch.zeros(len(self._segments), 2, dtype=torch.float64, device="cpu")
        self.agreed_at = torch.zeros((), dtype=torch.int64, device="cpu")
        self._own: list[Tensor] = []

    def look(self, gradient: Tensor, step: int) -> None:
        """Before a reduction: remember some of this rank's own gradient ``[S]``."""
        if step < FIRST or step % EVERY == 0:
            self._own = [part.double() for part in self._sampled(gradient, step)]

    def compare(self, out: Tensor, step: int, scale: float) -> None:
        """After it: compare them with what is handed out.

        Args:
            out: ``[S]``.
            scale: ranks over what their sum is divided by.
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
        # What is not finite (nor is 0 / 0) is seen in the gradient; here it would stay for ever.
        usable = share.isfinite()[:, None]
        # In place: FSDP's stream may still work with a tensor that is let go.
        torch.where(usable, self.sums * DECAY + new * (1 - DECAY), self.sums, out=self.sums)

    def state(self) -> dict[str, Tensor]:
        """What factors depend on."""
        # Errors about a state name the first of these.
        return {"noise": self.sums, "noise.agreed": self.agreed, "noise.agreed_at": self.agreed_at}

    @staticmethod
    def in_state(state: Container[str]) -> bool:
        """Whether these names of a unit's state have a gauge's among them."""
        return "noise" in state

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never has."""
        if bool((state["noise"][:, 0] < 0).any() | (state["noise.agreed"][:, 0] < 0).any()):
            raise ValueError("a weight of measured noise is negative")
        if not 0 <= int(state["noise.agreed_at"]) <= MAX_COUNT:
            raise ValueError("the count of reductions before the noise was agreed on is none")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken."""
        self.sums.copy_(state["noise"])
        self.agreed.copy_(state["noise.agreed"])
        self.agreed_at.copy_(state["noise.agreed_at"])

    def _sampled(self, row: Tensor, step: int) -> list[Tensor]:
        found = []
        for start, stop in self._segments:
            stride = -(-(stop - start) // SAMPLE)
            # Other elements in every step, in an order that repeats after all of them only.
            offset = step * 0x9E3779B1 % stride
            found.append(row[start + offset : stop : stride])
        return found


def noise_factor(sums: Tensor) -> float:
    """``f`` from a row of sums ``[2]`` on the CPU; 1 where nothing was measured, and between 1/2
    and 32 whatever was."""
    weight, shares = sums.tolist()
    if weight <= 0:
        return 1.0
    return min(32.0, max(0.5, (weight / max(shares, weight / 1024)) ** 0.5))
