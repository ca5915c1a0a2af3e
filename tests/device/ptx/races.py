"""Races: two accesses of one place by different threads, one of them a change, in no order.

Programs are never ordered. Threads of a program are ordered by barriers: an access comes before
those of other warps after the next ``bar.sync``, and before those of other lanes of its warp after
that or the next ``bar.warp.sync``. Atomic operations and volatile reads (``ld.volatile`` is a
relaxed read) never race with each other. A store of what the place holds already is no race, as
when several programs raise the same flag.

Worked example: thread 0 stores to place 7 at time 3, thread 40 reads it. With no barrier since
time 3 that is a race; after a barrier at time 4 it is not.

Per place and kind of access the latest stamps of two threads are kept, and which program it was,
so a race is found whatever the order was in which threads happened to run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
# A stamp: time, place in the code, thread.
_THREAD, _CODE = 28, 14
_NONE = -1
_SEVERAL = -2

# Which earlier accesses race with one.
AGAINST = {
    "read": ("write", "update"),
    "watch": ("write",),
    "write": ("read", "watch", "write", "update"),
    "update": ("read", "write"),
}


@dataclass(frozen=True)
class Access:
    """Who accesses now.

    Attributes:
        thread: number in the launch, per lane.
        program: number in the launch, per lane.
        since: time of the last barrier of the program, per lane; ``warp_since``: of the warp.
        now: time.
        code: place in the code.
        threads: of a program.
    """

    thread: Array
    program: Array
    since: Array
    warp_since: Array
    now: int
    code: int
    threads: int

    @property
    def stamp(self) -> Array:
        """Stamps of the lanes."""
        return self.thread | (self.code << _THREAD) | (self.now << (_THREAD + _CODE))


class _Track:
    """The accesses of one kind: per place the latest, the one before by another thread, and the
    program."""

    def __init__(self, places: int, shared: bool) -> None:
        self.last = np.full(places, _NONE, np.int64)
        self.other = np.full(places, _NONE, np.int64)
        # Shared memory has but one program.
        self.program = None if shared else np.full(places, _NONE, np.int32)

    def races(self, cell: Array, a: Access) -> Array:
        """Stamps of accesses that race, ``_NONE`` where there are none."""
        found = np.where(_unordered(self.last[cell], a), self.last[cell], _NONE)
        other = self.other[cell]
        found = np.where(_unordered(other, a), other, found)
        if self.program is not None:
            who = self.program[cell]
            foreign = (who == _SEVERAL) | ((who >= 0) & (who != a.program))
            found = np.where(foreign & (found == _NONE), self.last[cell], found)
        return found

    def record(self, cell: Array, a: Access) -> None:
        """Keep the lanes' accesses."""
        stamp = a.stamp
        before = self.last[cell]
        different = (before != _NONE) & (_thread(before) != a.thread)
        self.other[cell[different]] = before[different]
        self.last[cell] = stamp
        # Of several lanes at one place one is kept; another is the other.
        lost = self.last[cell] != stamp
        self.other[cell[lost]] = stamp[lost]
        if self.program is not None:
            who = self.program[cell]
            several = (who == _SEVERAL) | ((who >= 0) & (who != a.program))
            self.program[cell] = np.where(several, _SEVERAL, a.program)
            mixed = self.program[cell] != np.where(several, _SEVERAL, a.program)
            self.program[cell[mixed]] = _SEVERAL


def _thread(stamp: Array) -> Array:
    return stamp & ((1 << _THREAD) - 1)


def _unordered(stamp: Array, a: Access) -> Array:
    """Whether accesses of the past are by others, and not ordered by a barrier."""
    thread, time = _thread(stamp), stamp >> (_THREAD + _CODE)
    same_program = thread // a.threads == a.program
    since = np.where(thread // 32 == a.thread // 32, a.warp_since, a.since)
    return (stamp >= 0) & (thread != a.thread) & (~same_program | (time >= since))


class Watch:
    """All accesses of a region."""

    def __init__(self, places: int, *, shared: bool) -> None:
        self._places, self._shared = places, shared
        self._tracks: dict[str, _Track] = {}

    def find(self, kind: str, cell: Array, a: Access) -> tuple[Array, Array, Array]:
        """Lanes whose access races with an earlier one: lanes, where in the code that one was,
        and whether its program is the same."""
        found = np.full(cell.shape, _NONE, np.int64)
        for other in AGAINST[kind]:
            if other in self._tracks:
                stamps = self._tracks[other].races(cell, a)
                found = np.where(stamps == _NONE, found, stamps)
        lanes = np.nonzero(found != _NONE)[0]
        stamp = found[lanes]
        same = _thread(stamp) // a.threads == a.program[lanes]
        return lanes, (stamp >> _THREAD) & ((1 << _CODE) - 1), same

    def record(self, kind: str, cell: Array, a: Access) -> None:
        """Keep accesses."""
        if kind not in self._tracks:
            self._tracks[kind] = _Track(self._places, self._shared)
        self._tracks[kind].record(cell, a)

    def unwritten(self, cell: Array) -> Array:
        """Places that nobody wrote."""
        track = self._tracks.get("write")
        return np.full(cell.shape, True) if track is None else track.last[cell] == _NONE
