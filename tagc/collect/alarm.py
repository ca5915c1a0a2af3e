"""Errors that only the device can see, raised without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor

LAG = 2
"""Assume that a GPU is at most ``LAG`` notes behind the host, so that waiting for older notes takes
no time."""


class Alarm:
    """Raises ``RuntimeError(message)`` after a condition was true.

    On a CPU it raises at once; on a GPU after ``LAG`` more notes, on all ranks in the same step,
    and in every later step. Until then, the affected data is NaN.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._ever: Tensor | None = None
        # The last notes: a copy on the host, and an event that tells when the copy is done.
        self._noted: list[tuple[Tensor, torch.cuda.Event]] = []
        self._notes = 0

    def note(self, wrong: Tensor, floats: Tensor) -> None:
        """Note a condition.

        Args:
            wrong: the condition; boolean, ``[]``.
            floats: filled with NaN on a GPU if ``wrong``.

        Raises:
            RuntimeError: on a CPU, if ``wrong``.
        """
        if wrong.device.type == "cpu":
            if wrong:
                raise RuntimeError(self._message)
            return
        floats.masked_fill_(wrong, torch.nan)
        if self._ever is None:
            # Training cannot write to a tensor that an evaluation made in inference mode.
            with torch.inference_mode(False):
                self._ever = torch.zeros((), dtype=torch.bool, device=wrong.device)
        # It stays true, so a later note cannot hide an earlier one.
        self._ever.logical_or_(wrong)
        if wrong.device.type != "cuda":
            return
        if len(self._noted) <= LAG:
            with torch.inference_mode(False):
                on_host = torch.zeros((), dtype=torch.bool, pin_memory=True, device="cpu")
            self._noted.append((on_host, torch.cuda.Event()))
        on_host, copied = self._noted[self._notes % (LAG + 1)]
        on_host.copy_(self._ever, non_blocking=True)
        copied.record(torch.cuda.current_stream(wrong.device))
        self._notes += 1

    def check(self) -> None:
        """Raise RuntimeError if a note was true, the last ``LAG`` notes excepted."""
        if self._notes <= LAG:
            return
        # Wait, and don't ask whether the device is done: the answer would differ between ranks.
        on_host, copied = self._noted[self._notes % (LAG + 1)]
        copied.synchronize()
        if on_host:
            raise RuntimeError(self._message)

    def reset(self) -> None:
        """Forget all notes, because their cause was fixed."""
        self._ever, self._noted, self._notes = None, [], 0
