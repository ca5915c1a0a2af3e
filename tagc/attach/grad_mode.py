"""What FSDP2 does not tell an all-gather: whether a backward will need the parameters again."""

from __future__ import annotations

import torch


class GradMode:
    """Whether autograd records the forward that runs now; FSDP gathers under ``no_grad``, whatever
    the forward's mode.

    One serves all units of a model, since a unit's gather may be begun by the forward of another
    one (prefetching).
    """

    def __init__(self) -> None:
        self.enabled = True

    def note(self) -> None:
        """To be called before a module's forward."""
        self.enabled = torch.is_grad_enabled()
