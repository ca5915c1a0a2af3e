"""Which units' parameters optimizers have changed: all ranks see the same steps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tagc.comm import CopyGatherer
from tagc.fsdp.unit import Unit


class OptimizerSteps:
    """Tells gatherers of steps of any optimizer of torch's kind that holds parameters of theirs,
    until it is closed, or nobody has it any more."""

    def __init__(self, pairs: Sequence[tuple[Unit, CopyGatherer]]) -> None:
        self._pairs = [(unit, gatherer, set[int]()) for unit, gatherer in pairs]
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
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for unit, gatherer, seen in self._pairs:
            own = {id(p) for p in unit.trainable()}
            if own & stepped:
                seen |= own & stepped
                gatherer.note_step(sees_all=own <= seen)
