"""One unit of a model that is trained in several sites: its last common value, and the outer step.

A site trains on its own. When the unit is due, its change since the *anchor*, the value that all
sites last agreed on, is averaged over sites. The outer optimizer moves the anchor by the average,
and the site goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.collect.reducer import UnitReducer
from tagc.ops.fingerprint import fingerprint
from tagc.policy.sites import OuterConfig, SitesConfig

MEAN = OuterConfig(rate=1, momentum=0)
"""The outer optimizer that averages the parameters."""


class Shard(Protocol):
    """This rank's part of a unit's parameters."""

    def read(self, out: Tensor) -> None:
        """Copy it to ``out`` ``[S]``."""
        ...

    def write(self, values: Tensor) -> None:
        """Replace it by ``values`` ``[S]``."""
        ...

    def spoiled(self) -> Tensor:
        """The number of a parameter that is not finite, from 1; 0 if all are. int64 ``[]``."""
        ...


class Anchor:
    """The anchor of one unit, ``[S]`` float32, and the outer optimizer's state.

    Attributes:
        reducer: averages changes over sites.
        values: the anchor. It has the same bits in all sites.
        momentum: the outer momentum, ``[S]``; None without momentum.
        change: this site's change until it is exchanged, then the average of all sites until it
            is applied. Without delay there is none between exchanges; with delay it is then zero.
    """

    def __init__(
        self,
        shard: Shard,
        reducer: UnitReducer,
        group: dist.ProcessGroup | None,
        device: torch.device,
        config: SitesConfig,
    ) -> None:
        """Start from the parameters as they are.

        Args:
            group: this rank's counterparts in all sites; None before :meth:`connect`.
        """
        self.reducer = reducer
        self._shard, self._group, self._config = shard, group, config
        self.values = torch.empty(reducer.plan.buffer_columns, dtype=torch.float32, device=device)
        shard.read(self.values)
        self.momentum = torch.zeros_like(self.values) if config.outer.momentum else None
        self.change = torch.zeros_like(self.values) if config.delay else None

    @property
    def size(self) -> int:
        """Elements of this rank's shard, with padding."""
        return self.values.numel()

    @property
    def label(self) -> str:
        """The unit's name, for users."""
        return self.reducer.plan.info.label

    def connect(self, reducer: UnitReducer, group: dist.ProcessGroup) -> None:
        """Continue with other sites, and a reducer for them."""
        self.reducer, self._group = reducer, group

    def spoiled(self) -> Tensor:
        """The number, from 1, of a parameter that is not finite; 0 if all are. int64 ``[]``."""
        return self._shard.spoiled()

    def take_change(self, *, none: bool = False) -> None:
        """Note how far this site has come: the anchor minus its shard.

        Args:
            none: note no change, whatever the shard holds.
        """
        now = torch.empty_like(self.values) if self.change is None else self.change
        if none:
            self.change = now.zero_()
            return
        self._shard.read(now)
        self.change = torch.sub(self.values, now, out=now)

    @torch.no_grad()
    def exchanging(self) -> Iterator[None]:
        """Replace the change by its average over sites; a generator, which pauses while messages
        are in flight. All sites call it together. A single site keeps its change, and its
        residuals."""
        assert self.change is not None
        assert self._group is not None
        if self._group.size() == 1:
            self.reducer.counters.steps += 1
            return
        yield from self.reducer.reducing(self.change, self.change, self._group, dist.ReduceOp.AVG)
        self.reducer.free_buffers()

    @torch.no_grad()
    def apply(self, *, mean: bool = False) -> None:
        """Move the anchor by the average, as ``torch.optim.SGD(nesterov=True)`` would with the
        average as the gradient, and the site's shard to it.

        Args:
            mean: move both to the mean of the sites, whatever the outer optimizer does.
        """
        average, outer, alpha = self.change, self._config.outer, self._config.alpha
        assert average is not None
        if mean:
            outer, alpha = MEAN, 0.0
        elif self.momentum is not None:
            self.momentum.mul_(outer.momentum).add_(average)
            average.add_(self.momentum, alpha=outer.momentum)
        self.values.add_(average, alpha=-outer.rate)
        if alpha:
            self._shard.read(average)
            self._shard.write(average.lerp_(self.values, 1 - alpha))
        else:
            self._shard.write(self.values)
        self.change = average.zero_() if self._config.delay else None

    def drop_change(self) -> None:
        """Drop a change that was not exchanged."""
        self.change = (
            self.change.zero_() if self.change is not None and self._config.delay else None
        )

    @torch.no_grad()
    def reset(self) -> None:
        """Set the site's shard to the anchor."""
        self._shard.write(self.values)

    def restart(self) -> None:
        """Start again from the parameters as they are; what was owed is dropped."""
        self._shard.read(self.values)
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
