"""Progress on stderr for slow operations."""

from __future__ import annotations

import sys
import time

# Seconds before the first line, and between lines.
_PATIENCE = 2.0


def say(message: str) -> None:
    """A line on stderr, at once."""
    print(f"tagc: {message}", file=sys.stderr, flush=True)


class Progress:
    """Lines on stderr, for one rank; nothing if all is done at once."""

    def __init__(self, what: str, total: int | None = None, *, shown: bool = True) -> None:
        """Work that begins now.

        Args:
            what: is done, for example "compiling".
            total: parts of it, if that is known.
            shown: whether to say anything.
        """
        self._what, self._total, self._shown = what, total, shown
        self._begin = self._last = time.monotonic()
        self._done, self._said = 0, False

    def step(self) -> None:
        """One more part is done."""
        self._done += 1
        now = time.monotonic()
        if now - self._last >= _PATIENCE and self._done != self._total:
            self._last = now
            self._say(str(self._done) if self._total is None else f"{self._done} of {self._total}")

    def end(self) -> None:
        """All is done."""
        if self._said:
            self._say("done")

    def _say(self, how_far: str) -> None:
        if self._shown:
            seconds = time.monotonic() - self._begin
            say(f"{self._what}: {how_far}, {seconds:.0f} s")
            self._said = True
