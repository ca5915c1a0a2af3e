"""Errors that a device finds, and the host raises later."""

from __future__ import annotations

from tagc.codecs.workspace import Flags
from tagc.collect.replay import Store
from tagc.ops.program import Place


class Alarm:
    """Raises ``RuntimeError(message)`` after a flag was set.

    On a CPU it raises at once; on a GPU some steps later, see :class:`Flags`, on all ranks in the
    same step, and in every later step. Until then, the affected data is NaN.
    """

    def __init__(self, message: str, store: Store, flag: Place) -> None:
        self._message, self._store = message, store
        self._owner = store.owner(flag)
        self._on_cpu = store.take(flag) if store.device.type == "cpu" else None
        self._noted: list[Flags] = []

    def note(self) -> None:
        """Note that launches may have set the flag; raise on a CPU if they have."""
        capturing = self._store.capturing
        if capturing or self._store.device.type == "cuda":
            flags = self._store.workspace.flags
            if flags not in self._noted:
                self._noted.append(flags)
            if not capturing:  # `before_replay` ends the rounds of a graph
                flags.note(self._owner)
        elif self._on_cpu is not None and self._on_cpu:
            self._on_cpu.zero_()
            raise RuntimeError(self._message)

    def check(self) -> None:
        """Raise RuntimeError if the flag was set, as far as the host has seen."""
        for flags in self._noted:
            if flags.seen(self._owner):
                raise RuntimeError(self._message)

    def reset(self) -> None:
        """Reset the flag, because its cause was mended."""
        for flags in self._noted:
            flags.clear(self._owner)
