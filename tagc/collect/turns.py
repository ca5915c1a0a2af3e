"""Exchanges several units in turns: one is computed while messages of the others are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from tagc.plan import AT_ONCE


def in_turns(exchanges: Iterable[tuple[int, Iterator[None]]]) -> None:
    """Exchange all of these units. An exchange is a generator, which pauses while its messages are
    in flight.

    The order depends on the sizes only, so ranks that exchange the same units meet in the same
    collectives.

    Args:
        exchanges: the elements of each unit, and its exchange.
    """
    later, begun = deque(exchanges), deque[tuple[int, Iterator[None]]]()
    elements = 0
    while later or begun:
        if later and (not begun or elements + later[0][0] <= AT_ONCE):
            one = later.popleft()
            elements += one[0]
        else:
            one = begun.popleft()
        if next(one[1], _DONE) is _DONE:
            elements -= one[0]
        else:
            begun.append(one)


_DONE = object()
