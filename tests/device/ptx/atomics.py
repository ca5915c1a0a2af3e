"""Atomic operations on integers, with a result (``atom``) and without (``red``). Threads come in
random order."""

from __future__ import annotations

from typing import Any

import numpy as np

from .memory_access import check, locate
from .numbers import BITS, type_of
from .parse import Instruction
from .registry import Step, emulates, need
from .threads import Threads, address, operand

_FOLDS: dict[str, Any] = {
    "add": lambda old, x: old + x,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "max": max,
    "exch": lambda old, x: x,
}


@emulates("red", "atom")
def atomic(i: Instruction) -> Step:
    """Read, change and write in one."""
    result = i.operands[0] if i.base == "atom" else None
    at, *rest = i.operands[1:] if result else i.operands
    place_of, inputs = address(at), [operand(x, i.bits) for x in rest]
    number, size, shared = type_of(i.kind, i.bits), i.bits // 8, "shared" in i.parts
    need(i.bits > 0 and i.kind != "f", "its type")
    names = _FOLDS.keys() & {*i.parts}
    need(len(names) == 1 and "vec" not in i.parts, "which operation")
    (name,) = names
    fold = _FOLDS[name]

    def run(t: Threads, mask: np.ndarray | None) -> None:
        lanes = t.rng.permutation(t.active(mask))
        region, place = locate(t, place_of(t)[lanes], lanes, size, 1, shared, i)
        cells = region.cells(place, size).reshape(len(lanes), -1)
        for k in range(cells.shape[1]):
            check(t, region, "update", cells[:, k], lanes, i)
            region.watch.record("update", cells[:, k], t.access(lanes))
        view = region.view(size).view(number)
        values = [t.full(x(t))[lanes].view(number) for x in inputs]
        before = np.empty(len(lanes), number)
        for k, p in enumerate(place):
            before[k] = view[p]
            view[p] = fold(before[k], *(v[k] for v in values))
        if result:
            whole = np.zeros(t.count, BITS[i.bits])
            whole[lanes] = before.view(BITS[i.bits])
            t.write(result, whole, mask)

    return run
