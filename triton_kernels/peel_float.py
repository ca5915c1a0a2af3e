"""Peel ``float32`` symbols: as for integers, but in strict rounds, because sums round.

What is read from a cell depends on what was taken out of it before, so a key is read from the
first of its cells that holds only this key *when the round begins*, and removed from all of them
when every key of the round has been read: two kernels a round. Cells are float64 meanwhile, which
hides the order of the subtractions in nearly all cases: results are those of the reference unless
a sum lands within float64 rounding of the middle between two float32 numbers.

Worked example (2 hashes): keys A = 1.5 in cells 0 and 2, B = 0.25 in cells 1 and 2. Cells 1.5,
0.25 and 1.75 with degrees 1, 1 and 2: both keys are read from their first cell, 0 and 1.

The number of rounds launched is the measured one (see :mod:`.peel`); one program finishes the rest
however many they are. Launches after the last progress read one flag and leave.
"""

from __future__ import annotations

import triton
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import jit, tl
from .peel import BLOCK, FINISH_BLOCK, FINISH_WARPS, PROGRAMS, WARPS, synchronous_rounds
from .scalar import cell_of
from .table import FLAGS, Table


def launches(layout: SketchLayout) -> int:
    """Rounds launched before one program finishes the rest."""
    return min(FLAGS - 1, synchronous_rounds(layout))


@jit
def _find(entry, degree, keys, exact, slot, total, seed, partition, HASHES: tl.constexpr):
    """Read the keys of ``slot`` that lie alone in a cell; how many.

    Such a key is stored as ``-2 - key`` until it is removed from its cells, then as -1.
    """
    key = tl.load(keys + slot, mask=slot < total, other=-1, volatile=True)
    todo = key >= 0
    found = key < -1
    value = tl.zeros(key.shape, tl.float64)
    for i in tl.static_range(HASHES):
        cell = cell_of(key.to(tl.uint32, bitcast=True), seed, partition, i)
        alone = tl.load(degree + cell, mask=todo, other=0, volatile=True) == 1
        first = alone & (found == 0)
        value += tl.load(entry + cell, mask=first, other=0.0, volatile=True)
        found = found | alone
    tl.store(exact + slot, value, mask=found)
    tl.store(keys + slot, -2 - key, mask=found)
    return tl.sum(found.to(tl.int32), 0)


@jit
def _remove(entry, degree, keys, values, exact, slot, total, seed, partition, HASHES: tl.constexpr):
    """Take the keys that this round read out of their cells."""
    mark = tl.load(keys + slot, mask=slot < total, other=-1, volatile=True)
    read = mark < -1
    value = tl.load(exact + slot, mask=read, other=0.0, volatile=True)
    for i in tl.static_range(HASHES):
        cell = cell_of((-2 - mark).to(tl.uint32, bitcast=True), seed, partition, i)
        tl.atomic_add(entry + cell, -value, mask=read, sem="relaxed")
        tl.atomic_add(degree + cell, -1, mask=read, sem="relaxed")
    tl.store(values + slot, value.to(tl.float32), mask=read)
    tl.store(keys + slot, tl.full(mark.shape, -1, tl.int32), mask=read)


@jit(do_not_specialize=["launch", "partition", "seed", "stats"])
def find_kernel(
    entry, degree, keys, exact, flags, stats, seed, launch, partition,
    BLOCK: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    if tl.load(flags + launch) == 0:
        return
    total = tl.load(stats)
    seed_value = tl.load(seed)
    found = tl.zeros([], tl.int32)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(begin, total, tl.num_programs(0) * BLOCK):
        slot = start + tl.arange(0, BLOCK)
        found += _find(entry, degree, keys, exact, slot, total, seed_value, partition, HASHES)
    if found > 0:
        tl.store(flags + launch + 1, 1)


@jit(do_not_specialize=["launch", "partition", "seed", "stats"])
def remove_kernel(
    entry, degree, keys, values, exact, flags, stats, seed, launch, partition,
    BLOCK: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    if tl.load(flags + launch + 1) == 0:
        return
    total = tl.load(stats)
    seed_value = tl.load(seed)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(begin, total, tl.num_programs(0) * BLOCK):
        slot = start + tl.arange(0, BLOCK)
        _remove(entry, degree, keys, values, exact, slot, total, seed_value, partition, HASHES)


@jit(do_not_specialize=["launch", "partition", "seed", "stats"])
def finish_float_kernel(
    entry, degree, keys, values, exact, flags, stats, seed, launch, partition,
    BLOCK: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    total = tl.load(stats)
    seed_value = tl.load(seed)
    found = tl.load(flags + launch)
    while found > 0:
        found = tl.zeros([], tl.int32)
        for start in range(0, total, BLOCK):
            slot = start + tl.arange(0, BLOCK)
            found += _find(entry, degree, keys, exact, slot, total, seed_value, partition, HASHES)
        tl.debug_barrier()
        if found > 0:
            for start in range(0, total, BLOCK):
                slot = start + tl.arange(0, BLOCK)
                _remove(
                    entry, degree, keys, values, exact, slot, total, seed_value, partition, HASHES
                )
        tl.debug_barrier()


def peel_floats(seed: Tensor, stats: Tensor, table: Table, *, layout: SketchLayout) -> None:
    """Recover what can be recovered: ``table.values`` by slot, ``table.keys`` -1 where done."""
    if layout.groups == 0:
        return
    last = launches(layout)
    programs = min(PROGRAMS, max(1, triton.cdiv(layout.keys, BLOCK)))
    t = table
    shape = {"HASHES": layout.hashes, "enable_fp_fusion": False}
    for launch in range(last):
        find_kernel[(programs,)](
            t.entry, t.degree, t.keys, t.exact, t.flags, stats, seed, launch, layout.partition,
            BLOCK=BLOCK, num_warps=WARPS, **shape,
        )  # fmt: skip
        remove_kernel[(programs,)](
            t.entry, t.degree, t.keys, t.values, t.exact, t.flags, stats, seed, launch,
            layout.partition, BLOCK=BLOCK, num_warps=WARPS, **shape,
        )  # fmt: skip
    finish_float_kernel[(1,)](
        t.entry, t.degree, t.keys, t.values, t.exact, t.flags, stats, seed, last,
        layout.partition, BLOCK=FINISH_BLOCK, num_warps=FINISH_WARPS, **shape,
    )  # fmt: skip
