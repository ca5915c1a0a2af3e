"""Measures the RMS of a unit's decoded gradients relative to the dense gradient.

Adam divides by the RMS of gradients, so the codecs' noise makes its steps smaller, by the factor
``f``: the RMS of the decoded gradient over that of the dense gradient. No rank has the dense
gradient. But every rank contributes the same part of its mean square on average, so the owner of a
shard can estimate it from its own gradient ``g`` and from the decoded result ``h``, if ``h``
contains the step's whole gradient and the noise is independent of ``g``::

    1 / f^2 = E[g h] / E[h h]        for averages; for sums over W ranks W E[g h] / E[h h]

Both means are over a sample of the elements (:class:`tagc.ops.sampling.CompareNoise`). The ratio,
not each mean, is averaged over steps: gradients may fall by a factor of 20 in the first steps, and
large early means would dominate for long.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor

from tagc.codecs.state import check_counts

_FIRST, _EVERY = 32, 4


class NoiseGauge:
    """The noise in one unit's compressed segments on one rank.

    Attributes:
        sums: float64 ``[segments, 2]``: the total weight of the measured steps, which rises from 0
            towards 1, and the weighted sum of their ``1 / f^2``.
        agreed: the same over all ranks, as of the last exchange; on the CPU.
        agreed_at: the number of reductions at that exchange; int64 ``[]``.
    """

    def __init__(self, sums: Tensor) -> None:
        """Start with nothing measured in ``sums``."""
        self.sums = sums.zero_()
        self.agreed = torch.zeros(sums.shape, dtype=torch.float64, device="cpu")
        self.agreed_at = torch.zeros((), dtype=torch.int64, device="cpu")

    @staticmethod
    def measures(step: int) -> bool:
        """Whether this reduction is measured: all of the first, then one in four."""
        return step < _FIRST or step % _EVERY == 0

    def state(self) -> dict[str, Tensor]:
        """The measurements, by name."""
        # Errors about a state name the first of these.
        return {"noise": self.sums, "noise.agreed": self.agreed, "noise.agreed_at": self.agreed_at}

    @staticmethod
    def in_state(state: Container[str]) -> bool:
        """Whether the names of a unit's state include a gauge's."""
        return "noise" in state

    @staticmethod
    def check_state(state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never returns."""
        if bool((state["noise"][:, 0] < 0).any() | (state["noise.agreed"][:, 0] < 0).any()):
            raise ValueError("a weight of measured noise is negative")
        check_counts("reductions at the exchange of noise", state["noise.agreed_at"])

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a :meth:`state`."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def noise_factor(sums: Tensor) -> float:
    """``f`` from a row of sums ``[2]`` on the CPU, clamped to between 1/2 and 32; 1 if nothing was
    measured."""
    weight, shares = sums.tolist()
    if weight <= 0:
        return 1.0
    return min(32.0, max(0.5, (weight / max(shares, weight / 1024)) ** 0.5))
