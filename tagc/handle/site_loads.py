"""Notices that parameters were loaded after ``tagc.sites``, so that anchors do not pull them back.

What else writes to parameters between steps (a clamp, a projection) is a part of training.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tagc.attach.sites import SiteUnit
from tagc.basics.warn import warn
from tagc.collect import SiteExchange
from tagc.ops.fingerprint import fingerprint


class SiteLoads:
    """Makes the parameters the anchors once they were loaded, unless the anchors were, too.

    Before the first step any change counts as a load; later what ``load_state_dict`` changed, of
    the model or a part of it.
    """

    def __init__(self, model: nn.Module, units: Sequence[SiteUnit], exchange: SiteExchange) -> None:
        self._units, self._exchange = units, exchange
        self._trained, self._state_loaded, self._warned = False, False, False
        # The parameters before the first load since the last step.
        self._before: Tensor | None = None
        self._writes = self._count_writes()
        hook = _BeforeLoad(self)
        self._hooks = [m.register_load_state_dict_pre_hook(hook) for m in model.modules()]

    def settle(self, *, begins: bool = False) -> None:
        """Go on from the parameters if they were loaded. Call it before anything depends on the
        anchors.

        Args:
            begins: whether a step or an exchange begins.
        """
        if not self._state_loaded:
            # A site that continues from another one has its anchors from there.
            fresh = not self._trained and not self._exchange.waits.healed
            if fresh or self._is_other():
                self._exchange.refresh()
            elif self._trained and self._before is None and self._writes != self._count_writes():
                self._warn()
            self._before = None
        self._trained |= begins
        self.note_writes()

    def note_load(self) -> None:
        """Note that parameters are about to be loaded."""
        if self._before is None:
            self._before = self._marks()

    def note_state(self) -> None:
        """Note that anchors were loaded: what parameters hold until the next step belongs to
        them."""
        self._state_loaded = self._trained = True

    def note_step(self) -> None:
        """Note a step, and the exchanges after it, in which another site may send parameters."""
        self._state_loaded, self._before = False, None
        self.note_writes()

    def note_writes(self) -> None:
        """Note that what was written to parameters so far was training, or is dealt with."""
        self._writes = self._count_writes()

    def close(self) -> None:
        """Stop listening."""
        while self._hooks:
            self._hooks.pop().remove()

    def _is_other(self) -> bool:
        """Whether loads left other parameters than before; not if averaged ones were swapped in and
        out."""
        return self._before is not None and not torch.equal(self._before, self._marks())

    def _marks(self) -> Tensor:
        return torch.stack([fingerprint(unit.shard_values()) for unit in self._units])

    def _count_writes(self) -> int:
        return sum(unit.writes for unit in self._units)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                "tagc.sites: something other than an optimizer or load_state_dict wrote to "
                "parameters between two steps, which counts as this site's training. If they were "
                "loaded, call refresh() of the handle on all ranks of all sites"
            )


class _BeforeLoad:
    """A hook of modules that notes a load."""

    def __init__(self, loads: SiteLoads) -> None:
        self._loads = weakref.ref(loads)

    def __call__(self, *args: Any) -> None:
        if (loads := self._loads()) is not None:
            loads.note_load()

    def __reduce__(self) -> Any:
        # In a copy of the model, also a pickled one, a function that does nothing.
        return getattr, (nullcontext(), "__exit__")
