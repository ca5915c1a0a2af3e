"""Atomic operations, with a result (``atom``) and without (``red``).

Threads come in random order. Additions to float32 in global memory flush subnormal operands and
results to zero, as the hardware does (PTX ISA, ``atom``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .memory_access import check, locate
from .numbers import BITS, computed, type_of
from .parse import Instruction
from .registry import Step, emulates, need
from .threads import Threads, address, operand

_LEAST = np.float32(2.0**-126)


@emulates("red", "atom")
def atomic(i: Instruction) -> Step:
    """Read, change and write in one."""
    result = i.operands[0] if i.base == "atom" else None
    at, *rest = i.operands[1:] if result else i.operands
    place_of, inputs = address(at), [operand(x, i.bits) for x in rest]
    number, size, shared = type_of(i.kind, i.bits), i.bits // 8, "shared" in i.parts
    need(i.parts[-1] not in ("f16x2", "bf16", "bf16x2") and "noftz" not in i.parts, "its type")
    names = _FOLDS.keys() & {*i.parts}
    need(len(names) == 1 and "vec" not in i.parts, "which operation")
    (name,) = names
    fold = _flushed if (name, i.parts[-1], shared) == ("add", "f32", False) else _FOLDS[name]

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
            t.write(result, whole, mask if mask is not None else None)

    return run


def _add(old: Any, x: Any) -> Any:
    total = old + x
    return computed(total).view(total.dtype) if total.dtype.kind == "f" else total


def _flushed(old: Any, x: Any) -> Any:
    def flush(v):
        return np.copysign(np.float32(0), v) if abs(v) < _LEAST else v

    return flush(_add(flush(old), flush(x)))


_FOLDS: dict[str, Any] = {
    "add": _add,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "max": max,
    "exch": lambda old, x: x,
}
