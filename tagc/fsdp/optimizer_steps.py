"""Which units' parameters optimizers have changed: all ranks see the same steps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tagc.comm import CopyGatherer
from tagc.fsdp.unit import Unit


class OptimizerSteps:
    """Tells gatherers of steps of any optimizer of torch's kind that holds parameters of theirs,
    until it is closed, or nobody has it any more."""

    def __init__(self, pairs: Sequence[tuple[Unit, CopyGatherer]]) -> None:
        self._pairs = list(pairs)
        self._held = self._who_holds()
        mine = weakref.ref(self)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            steps = mine()
            if steps is not None:
                steps._note(optimizer)

        handle = register_optimizer_step_post_hook(after_step)
        self._close = weakref.finalize(self, handle.remove)

    def close(self) -> None:
        """Listen no longer."""
        self._close()

    def _note(self, optimizer: Optimizer) -> None:
        params = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if not any(p in self._held for p in params):
            # Of another model; or FSDP has new parameters, as after a load with `assign`.
            self._held = self._who_holds()
        stepped = {self._held[p][1]: None for p in params if p in self._held}
        for gatherer in stepped:
            gatherer.note_step()

    def _who_holds(self) -> dict[int, tuple[nn.Parameter, CopyGatherer]]:
        """By the id of a parameter, which is kept so that nothing else has this id."""
        return {id(p): (p, gatherer) for unit, gatherer in self._pairs for p in unit.trainable()}
