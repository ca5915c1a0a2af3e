"""Exchanges between the lanes of a warp, all of which must take part."""

from __future__ import annotations

from typing import Any

import numpy as np

from .faults import DivergenceError
from .memory_access import change, locate, observe
from .parse import Instruction, elements
from .registry import Step, emulates, need
from .threads import Threads, address, operand

Array = np.ndarray
_LANE = np.arange(32)


def warps(t: Threads, mask: Array | None, i: Instruction) -> None:
    """Refuse a warp some of whose lanes are elsewhere."""
    if mask is not None:
        each = mask.reshape(-1, 32)
        some = each.any(1)
        if (some & ~each.all(1)).any():
            lane = 32 * int(np.nonzero(some & ~each.all(1))[0][0])
            raise DivergenceError(f"{i.where}: {i.opcode} without all lanes of a warp (program "
                             f"{int(t.number[lane])})")  # fmt: skip


@emulates("shfl")
def shuffle(i: Instruction) -> Step:
    """A value of another lane; its own where that lane is out of range."""
    mode, (target, _, inside) = i.parts[2], i.operands[0].partition("|")
    value, by, limit = (operand(x, 32) for x in i.operands[1:4])
    need(mode in ("bfly", "up", "idx"), "mode")

    def run(t: Threads, mask: Array | None) -> None:
        warps(t, mask, i)
        x = t.full(value(t)).reshape(-1, 32)
        k, c = (t.full(v(t)).reshape(-1, 32).astype(np.int64) for v in (by, limit))
        k, segment, clamp = k & 31, c >> 8 & 31, c & 31
        last = (_LANE & segment) | (clamp & ~segment)
        lane = {
            "bfly": _LANE ^ k, "up": _LANE - k, "idx": (_LANE & segment) | (k & ~segment),
        }[mode]  # fmt: skip
        fits = lane >= last if mode == "up" else lane <= last
        lane = np.where(fits, lane, _LANE)
        t.write(target, np.take_along_axis(x, lane, 1).ravel(), mask)
        if inside:
            t.write(inside, fits.ravel(), mask)

    return run


@emulates("redux")
def reduction(i: Instruction) -> Step:
    """A warp's sum, least or largest."""
    name, number = i.parts[2], np.int32 if i.kind == "s" else np.uint32
    folds: Any = {"add": np.add, "min": np.minimum, "max": np.maximum}
    need(name in folds, "which operation")
    fold = folds[name]
    value = operand(i.operands[1], 32)

    def run(t: Threads, mask: Array | None) -> None:
        warps(t, mask, i)
        x = t.full(value(t)).view(number).reshape(-1, 32)
        got = fold.reduce(x, 1, dtype=number).view(np.uint32)
        t.write(i.operands[0], np.repeat(got, 32), mask)

    return run


@emulates("ldmatrix", "stmatrix")
def matrices(i: Instruction) -> Step:
    """One, two or four matrices of 8 x 8 halfwords between shared memory and a warp.

    Lane ``l`` holds the halfwords ``2 * (l % 4)`` and the next of row ``l // 4``. The rows of
    matrix ``m`` start at the addresses of the lanes from ``8 * m``.
    """
    loads = i.base == "ldmatrix"
    registers = elements(i.operands[0 if loads else 1])
    at = address(i.operands[1 if loads else 0])
    inputs = [operand(r, 32) for r in registers]
    need("m8n8" in i.parts and i.parts[-1] == "b16", "shape")
    row, column = _LANE // 4, 2 * (_LANE % 4)

    def run(t: Threads, mask: Array | None) -> None:
        warps(t, mask, i)
        lanes = t.active(mask)
        starts = at(t)[lanes].reshape(-1, 32)
        for m, register in enumerate(registers):
            rows = starts[:, 8 * m : 8 * m + 8]
            locate(t, rows.ravel(), np.repeat(lanes[::32], 8), 16, 1, True, i)
            halves = []
            for half in range(2):
                r, c = (column + half, row) if "trans" in i.parts else (row, column + half)
                where = (rows[:, r] + 2 * c).ravel()
                region, place = locate(t, where, lanes, 2, 1, True, i)
                if loads:
                    observe(t, region, place, 2, lanes, "read", i)
                    halves.append(region.view(2)[place].astype(np.uint32))
                else:
                    value = t.full(inputs[m](t))[lanes] >> np.uint32(16 * half)
                    change(t, region, place, 2, lanes, value.astype(np.uint16), i)
            if loads:
                whole = np.zeros(t.count, np.uint32)
                whole[lanes] = halves[0] | halves[1] << np.uint32(16)
                t.write(register, whole, mask)

    return run
