"""One unit of a model that is trained in several sites: its last common value, and the outer step.

A site trains on its own. When the unit is due, its change since the *anchor*, the value that all
sites last agreed on, is averaged over sites. The outer optimizer moves the anchor by the average,
and the site goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.collect import UnitReducer
from tagc.ops.fingerprint import fingerprint
from tagc.policy.rules import OuterConfig, SitesConfig
from tagc.site.units import SiteUnit

_MEAN = OuterConfig(rate=1, momentum=0)


class Anchor:
    """The anchor of one unit, ``[S]`` float32, and the outer optimizer's state.

    Attributes:
        reducer: averages changes over sites.
        group: this rank's counterparts in all sites; None while they are not known.
        values: the anchor. It has the same bits in all sites.
        change: this site's change until it is exchanged, then the average of all sites until it
            is applied. Without delay there is none between exchanges; with delay it is then zero.
    """

    def __init__(
        self,
        unit: SiteUnit,
        reducer: UnitReducer,
        group: dist.ProcessGroup | None,
        config: SitesConfig,
    ) -> None:
        """Start from the parameters as they are."""
        self.unit, self.reducer, self.group = unit, reducer, group
        self._config = config
        self.values = unit.read()
        self.momentum = torch.zeros_like(self.values) if config.outer.momentum else None
        self.change: Tensor | None = None
        self.drop_change()

    @property
    def label(self) -> str:
        """The unit's name, for users."""
        return self.unit.info.label

    def take_change(self, *, none: bool = False) -> None:
        """Note how far this site has come: the anchor minus its shard; with ``none``, nothing."""
        change = torch.empty_like(self.values) if self.change is None else self.change
        if none:
            self.change = change.zero_()
        else:
            self.change = torch.sub(self.values, self.unit.read(change), out=change)

    def drop_change(self) -> None:
        """Drop a change that was not exchanged. What failed may still write to its tensor."""
        self.change = torch.zeros_like(self.values) if self._config.delay else None

    @torch.no_grad()
    def exchanging(self) -> Iterator[None]:
        """Replace the change by its average over sites; a generator, which pauses while messages
        are in flight. All sites call it together. A single site keeps its change, and its
        residuals."""
        assert self.change is not None
        assert self.group is not None
        if self.group.size() == 1:
            self.reducer.counters.steps += 1
            return
        yield from self.reducer.reducing(self.change, self.change, self.group, dist.ReduceOp.AVG)
        self.reducer.free_buffers()

    @torch.no_grad()
    def apply(self, *, mean: bool = False) -> None:
        """Move the anchor by the average, as ``torch.optim.SGD(nesterov=True)`` would with the
        average as the gradient, and the site's shard to it; with ``mean``, both to the mean of the
        sites."""
        average, outer, alpha = self.change, self._config.outer, self._config.alpha
        assert average is not None
        if mean:
            outer, alpha = _MEAN, 0.0
        elif self.momentum is not None:
            self.momentum.mul_(outer.momentum).add_(average)
            average.add_(self.momentum, alpha=outer.momentum)
        self.values.add_(average, alpha=-outer.rate)
        if alpha:
            self.unit.write(self.unit.read(average).lerp_(self.values, 1 - alpha))
        else:
            self.unit.write(self.values)
        self.change = average.zero_() if self._config.delay else None

    def restart(self) -> None:
        """Start again from the parameters as they are; what was owed is dropped."""
        self.unit.read(self.values)
        for kept in (self.momentum, self.change):
            if kept is not None:
                kept.zero_()
        self.reducer.drop_owed()

    def mark(self) -> Tensor:
        """What must be equal in all sites before an exchange: how many there were, and a
        fingerprint of the anchor; int64 ``[3]``."""
        # Filled on the device: a copy from the host would wait for all that the device has to do.
        count = self.values.new_full((1,), self.reducer.counters.all_steps, dtype=torch.int64)
        return torch.cat((count, fingerprint(self.values)))

    @property
    def shared(self) -> dict[str, Tensor]:
        """The tensors ``[S]`` that all sites hold alike, by kind as named in checkpoints."""
        found = {"anchor": self.values, "momentum": self.momentum, "in_flight": self.change}
        return {kind: values for kind, values in found.items() if values is not None}
