"""How supports overlap: measured on some ranks, fitted, extrapolated, and drawn for many.

Every group of elements has a probability ``p`` that a rank selects it, the same for all ranks
(their data are of one kind), and ranks select independently given ``p``. Its distribution over the
groups is that of ``link(spread * n - shift)`` with ``n`` normal: ``spread`` 0 is independence
(``p`` the density everywhere), infinity is full agreement. The density fixes the shift, and the
spread is fitted to the measured union densities, by least squares of their logarithms.

The ``probit`` link is used, as it fits best; how far ``logistic`` and ``scale`` (a normal gradient
whose size is log-normal over the groups) fall from it beyond the measured ranks says how uncertain
the extrapolation is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_GRID = torch.linspace(-6, 6, 2001, dtype=torch.float64)
_WEIGHTS = torch.softmax(-(_GRID**2) / 2, 0)


def _scale(z: Tensor) -> Tensor:
    return torch.special.erfc(torch.exp(-z.clamp(-40, 40)) / math.sqrt(2))


LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "probit": torch.special.ndtr,
    "logistic": torch.sigmoid,
    "scale": _scale,
}


def union_densities(times_selected: Tensor, ranks: int) -> dict[int, float]:
    """Union density of 1, 2, 4, ... of the ranks, averaged over all choices of them.

    Args:
        times_selected: how many of the ranks select each group.
    """
    histogram = torch.bincount(times_selected, minlength=ranks + 1).double()
    histogram /= histogram.sum()
    worlds = [2**i for i in range(ranks.bit_length()) if 2**i <= ranks]
    found = {}
    for world in worlds:
        missed = [
            math.comb(ranks - times, world) / math.comb(ranks, world) for times in range(ranks + 1)
        ]
        found[world] = 1 - float(histogram @ torch.tensor(missed, dtype=torch.float64))
    return found


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A distribution of selection probabilities."""

    density: float
    spread: float
    link: str = "probit"

    @classmethod
    def fit(cls, measured: Mapping[int, float], link: str = "probit") -> Overlap:
        """The spread that explains the union densities by number of ranks."""

        def misfit(spread: float) -> float:
            overlap = cls(density=measured[1], spread=spread, link=link)
            return sum(math.log(overlap.union(w) / u) ** 2 for w, u in measured.items())

        low, high = math.log(0.02), math.log(20.0)
        for _ in range(40):  # the misfit has one minimum
            third = (high - low) / 3
            if misfit(math.exp(low + third)) < misfit(math.exp(high - third)):
                high -= third
            else:
                low += third
        return cls(density=measured[1], spread=math.exp((low + high) / 2), link=link)

    def union(self, ranks: int) -> float:
        """Expected fraction of groups that at least one of so many ranks selects."""
        p = self._probability(_GRID)
        return float(_WEIGHTS @ (1 - (1 - p) ** ranks))

    def misfit(self, measured: Mapping[int, float]) -> float:
        """The largest relative error."""
        return max(abs(self.union(w) / u - 1) for w, u in measured.items())

    def supports(self, groups: int, ranks: int, seed: int) -> Iterator[Tensor]:
        """Which groups each rank selects, bool ``[groups]``."""
        generator = torch.Generator().manual_seed(seed)
        # float32 from here: what matters is that ranks share it.
        latent = torch.randn(groups, generator=generator, dtype=torch.float64)
        p = self._probability(latent).float()
        for _ in range(ranks):
            yield torch.rand(groups, generator=generator) < p

    @property
    def shift(self) -> float:
        """What makes the mean probability the density."""
        low, high = (sign * (50 + 10 * self.spread) for sign in (-1, 1))
        link = LINKS[self.link]
        for _ in range(50):
            middle = (low + high) / 2
            if float(_WEIGHTS @ link(self.spread * _GRID - middle)) > self.density:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def _probability(self, n: Tensor) -> Tensor:
        return LINKS[self.link](self.spread * n - self.shift)
