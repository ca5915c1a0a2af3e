"""Errors that only the device can see, raised without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


class Alarm:
    """Raises ``RuntimeError(message)`` once a condition was true: on a CPU where it is noted, on a
    GPU in a later step, when the host knows it without waiting, and in all that follow. Until then
    the data that is wrong are NaN."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._ever: Tensor | None = None
        self._on_host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

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
        if self._on_host is None or self._copied is None:
            with torch.inference_mode(False):
                self._on_host = torch.zeros((), dtype=torch.bool, pin_memory=True, device="cpu")
            self._copied = torch.cuda.Event()
        self._on_host.copy_(self._ever, non_blocking=True)
        self._copied.record()

    def check(self) -> None:
        """Raise RuntimeError for what was noted, if the host knows it by now."""
        known = self._copied is not None and self._copied.query()
        if known and self._on_host is not None and self._on_host:
            raise RuntimeError(self._message)

    def reset(self) -> None:
        """Forget what was noted: it has been put right."""
        self._ever = self._on_host = self._copied = None
