"""Errors that only the device can see, raised without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


class Alarm:
    """Raises ``RuntimeError(message)`` once a condition was true: on a CPU where it is noted, on a
    GPU in a later step, when the host knows it without waiting. Until then the data that is wrong
    are NaN."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._seen: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def note(self, wrong: Tensor, floats: Tensor) -> None:
        """Note a condition.

        Args:
            wrong: boolean, ``[]``.
            floats: set to NaN if ``wrong``, on a GPU.

        Raises:
            RuntimeError: on a CPU, if ``wrong``.
        """
        if wrong.device.type == "cpu":
            if wrong:
                raise RuntimeError(self._message)
            return
        floats.masked_fill_(wrong, torch.nan)
        if wrong.device.type != "cuda":
            return
        if self._seen is None:
            self._seen = torch.zeros((), dtype=torch.bool, pin_memory=True)
        elif self._arrived is not None and not self._arrived.query():
            # This one is told by NaN alone: to overwrite the former could hide it.
            return
        self._seen.copy_(wrong, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def check(self) -> None:
        """Raise RuntimeError for what was noted and has arrived."""
        if self._seen is not None and self._arrived is not None and self._arrived.query():
            self._arrived = None
            if self._seen:
                raise RuntimeError(self._message)
