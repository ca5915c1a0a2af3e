"""Loads and stores: every access is checked, see :mod:`.memory` and :mod:`.races`."""

from __future__ import annotations

import numpy as np

from .faults import OutOfBoundsError, RaceError, UninitializedError
from .memory import Region
from .numbers import BITS, type_of
from .parse import Instruction, elements
from .registry import Step, emulates, need
from .threads import Threads, address, operand

Array = np.ndarray


@emulates("ld")
def load(i: Instruction) -> Step:
    """``ld.param``, ``ld.global`` and ``ld.shared``, vectors as well."""
    if "param" in i.parts:
        return _parameter(i)
    names, at = elements(i.operands[0]), address(i.operands[1])
    size, shared = i.bits // 8, "shared" in i.parts
    need(shared or "global" in i.parts, "which memory")
    kind = "watch" if "volatile" in i.parts or "relaxed" in i.parts else "read"

    def run(t: Threads, mask: Array | None) -> None:
        lanes = t.active(mask)
        region, place = locate(t, at(t)[lanes], lanes, size, len(names), shared, i)
        for k, name in enumerate(names):
            observe(t, region, place + k, size, lanes, kind, i)
            got = _widened(region.view(size)[place + k], i, t.kernel.width(name))
            if mask is not None:
                whole = np.zeros(t.count, got.dtype)
                whole[lanes] = got
                got = whole
            t.write(name, got, mask)

    return run


@emulates("st")
def store(i: Instruction) -> Step:
    """``st.global`` and ``st.shared``, vectors as well."""
    at, names = address(i.operands[0]), elements(i.operands[1])
    size, shared = i.bits // 8, "shared" in i.parts
    need(shared or "global" in i.parts, "which memory")
    inputs = [operand(name, i.bits) for name in names]

    def run(t: Threads, mask: Array | None) -> None:
        lanes = t.active(mask)
        region, place = locate(t, at(t)[lanes], lanes, size, len(names), shared, i)
        for k, read in enumerate(inputs):
            change(t, region, place + k, size, lanes, t.full(read(t))[lanes], i)

    return run


def _parameter(i: Instruction) -> Step:
    name, _, offset = i.operands[1].strip("[] ").partition("+")
    need(not offset, "a part of a parameter")
    target = i.operands[0]

    def run(t: Threads, mask: Array | None) -> None:
        if name.startswith("%"):  # the number of a parameter, as an address
            bits = np.array([*t.parameters.values()], np.uint64).take(t.read(name), mode="clip")
        else:
            bits = np.uint64(t.parameters[name])
        t.write(target, _widened(bits.astype(BITS[i.bits]), i, t.kernel.width(target)), mask)

    return run


def _widened(got, i: Instruction, width: int):
    """As a register's bits, which may be more."""
    return got if width == i.bits else (
        got.view(type_of(i.kind, i.bits)).astype(type_of(i.kind, width)).view(BITS[width])
    )  # fmt: skip


def locate(
    t: Threads, at: Array, lanes: Array, size: int, count: int, shared: bool, i: Instruction
) -> tuple[Region, Array]:
    """The region of an access, and its elements there."""
    if not shared:
        region = t.memory.region(at, i.where)
        return region, region.places(at, size, count, i.where)
    region = t.shared
    if int(at.max()) + size * count > t.shared_size:
        raise OutOfBoundsError(
            f"{i.where}: byte {int(at.max())} of {t.shared_size} of shared memory"
        )
    region.places(at, size, count, i.where)
    return region, at // size + t.program[lanes] * (t.shared_size // size)


def observe(
    t: Threads, region: Region, place: Array, size: int, lanes: Array, kind: str, i: Instruction
) -> None:
    """Check and remember reads of elements."""
    for cell in _cells(region, place, size):
        if region is t.shared:
            empty = region.watch.unwritten(cell)
            if empty.any():
                raise UninitializedError(
                    f"{i.where}: a thread reads shared memory that nobody wrote ({i.opcode})"
                )
        check(t, region, kind, cell, lanes, i)
        region.watch.record(kind, cell, t.access(lanes))


def change(
    t: Threads, region: Region, place: Array, size: int, lanes: Array, value: Array, i: Instruction
) -> None:
    """Check, remember and do stores of elements."""
    view = region.view(size)
    value = value.astype(view.dtype)  # the lower bits of a register that may be wider
    new = ~(view[place] == value)  # a store of what is there already races with nothing
    for cell in _cells(region, place, size):
        if new.any():
            check(t, region, "write", cell[new], lanes[new], i)
        region.watch.record("write", cell, t.access(lanes))
    view[place] = value
    lost = view[place] != value
    if lost.any():
        n = int(lanes[lost][0])
        raise RaceError(f"{i.where}: threads store different values at one place ({_who(t, n)})")


def _cells(region: Region, place: Array, size: int) -> list[Array]:
    return [*region.cells(place, size).reshape(len(place), -1).T]


def check(t: Threads, region: Region, kind: str, cell: Array, lanes: Array, i: Instruction) -> None:
    """Refuse an access that races with an earlier one."""
    found, code, same = region.watch.find(kind, cell, t.access(lanes))
    if len(found):
        earlier = t.kernel.code[int(code[0])]
        how = "without a barrier in between" if same[0] else "by another program"
        raise RaceError(
            f"{i.where}: {i.opcode} of {region.name} races with {earlier.opcode} at "
            f"{earlier.where} {how} ({_who(t, int(lanes[found[0]]))})"
        )


def _who(t: Threads, lane: int) -> str:
    return f"program {int(t.number[lane])}, thread {int(t.lanes[lane] % t.threads)}"
