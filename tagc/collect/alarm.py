"""Errors that only the device can see, raised without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor

LAG = 2
"""Notes that a GPU is behind the host at most, so that to wait for an older one takes no time."""


class Alarm:
    """Raises ``RuntimeError(message)`` once a condition was true: on a CPU where it is noted, on a
    GPU after ``LAG`` more notes, on all ranks in the same step, and in all that follow. Until then
    the data that is wrong are NaN."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._ever: Tensor | None = None
        # Of the last notes: what they were copied to on the host, and when that is done.
        self._noted: list[tuple[Tensor, torch.cuda.Event]] = []
        self._notes = 0

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
        if self._ever is None:
            # In training nothing could be written to one that an evaluation made in inference mode.
            with torch.inference_mode(False):
                self._ever = torch.zeros((), dtype=torch.bool, device=wrong.device)
        # It stays true, so that no copy hides what an earlier one would have told.
        self._ever.logical_or_(wrong)
        if wrong.device.type != "cuda":
            return
        if len(self._noted) <= LAG:
            with torch.inference_mode(False):
                on_host = torch.zeros((), dtype=torch.bool, pin_memory=True, device="cpu")
            self._noted.append((on_host, torch.cuda.Event()))
        on_host, copied = self._noted[self._notes % (LAG + 1)]
        on_host.copy_(self._ever, non_blocking=True)
        copied.record()
        self._notes += 1

    def check(self) -> None:
        """Raise RuntimeError for what was noted ``LAG`` notes before the last one, or earlier."""
        if self._notes <= LAG:
            return
        # Whether the device is done already differs from rank to rank, so nobody asks that.
        on_host, copied = self._noted[self._notes % (LAG + 1)]
        copied.synchronize()
        if on_host:
            raise RuntimeError(self._message)

    def reset(self) -> None:
        """Forget what was noted: it has been put right."""
        self._ever, self._noted, self._notes = None, [], 0
