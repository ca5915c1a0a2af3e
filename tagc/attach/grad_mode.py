"""Tells an all-gather, as FSDP2 does not, whether a backward will need the parameters again."""

from __future__ import annotations

import torch


class GradMode:
    """Whether autograd records the running forward. FSDP itself always gathers under ``no_grad``.

    All units of a model share one object, because another unit's forward may begin a unit's gather
    (prefetching).
    """

    def __init__(self) -> None:
        self.enabled = True

    def note(self) -> None:
        """Call this before a module's forward."""
        self.enabled = torch.is_grad_enabled()
