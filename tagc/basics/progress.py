"""Progress on stderr for slow operations."""

from __future__ import annotations

import sys
import time

# Seconds before the first line, and between lines.
_PATIENCE = 2.0


def say(message: str) -> None:
    """Print a line on stderr and flush it."""
    print(f"tagc: {message}", file=sys.stderr, flush=True)


class Progress:
    """Prints the progress of a slow operation on stderr. Prints nothing if it is fast."""

    def __init__(self, what: str, total: int | None = None, *, shown: bool = True) -> None:
        """Begin the operation.

        Args:
            what: the text of its lines, for example "operators checked".
            total: number of its parts, if known.
            shown: whether to print; usually on one rank only.
        """
        self._what, self._total, self._shown = what, total, shown
        self._begin = self._last = time.monotonic()
        self._done, self._printed = 0, False

    def step(self) -> None:
        """Count one more part as done."""
        self._done += 1
        now = time.monotonic()
        if now - self._last >= _PATIENCE and self._done != self._total:
            self._last = now
            self._print(
                str(self._done) if self._total is None else f"{self._done} of {self._total}"
            )

    def end(self) -> None:
        """Finish the operation."""
        if self._printed:
            self._print("done")

    def _print(self, how_far: str) -> None:
        if self._shown:
            seconds = time.monotonic() - self._begin
            say(f"{self._what}: {how_far}, {seconds:.0f} s")
            self._printed = True
