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
        self._message, self._store, self._flag = message, store, flag
        self._owner = store.owner(flag)
        self._noted: list[Flags] = []

    def note(self) -> None:
        """Note that launches may have set the flag; raise on a CPU if they have."""
        device = self._store.device
        if self._store.capturing:
            self._watch()  # its replays set it, and `before_replay` ends their rounds
        elif device.type == "cpu":
            flag = self._store.take(self._flag)
            if flag:
                flag.zero_()
                raise RuntimeError(self._message)
        elif device.type == "cuda":
            self._watch().note(self._owner)

    def _watch(self) -> Flags:
        """The flags of the current stream, which :meth:`check` reads from now on."""
        flags = self._store.workspace.flags
        if flags not in self._noted:
            self._noted.append(flags)
        return flags

    def check(self) -> None:
        """Raise RuntimeError if the flag was set, as far as the host has seen."""
        for flags in self._noted:
            if flags.seen(self._owner):
                raise RuntimeError(self._message)

    def reset(self) -> None:
        """Reset the flag, because its cause was mended."""
        for flags in self._noted:
            flags.clear(self._owner)
