"""What FSDP2 does not tell an all-gather: whether a backward will need the parameters again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class GradMode:
    """Whether autograd records the forward that runs now; FSDP gathers under ``no_grad``, whatever
    the forward's mode.

    One serves all units of a model, since a unit's gather may be begun by the forward of another
    one (prefetching).
    """

    def __init__(self) -> None:
        self.enabled = True

    def note(self, module: nn.Module, args: Any) -> None:
        """To be called before a module's forward, as a hook."""
        self.enabled = torch.is_grad_enabled()
