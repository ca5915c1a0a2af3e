"""Peel integer symbols: a cell with one key left is that key's symbol; take it out everywhere.

A table entry is ``value << 32 | degree``, so one 64-bit load sees value and degree of the same
moment and one atomic addition of ``-(symbol << 32) - 1`` removes a key from a cell. A degree of one
read at any time says that the value beside it is the symbol: whatever order programs run in, the
same keys are recovered with the same symbols. Each key belongs to one thread.

Worked example (2 hashes): keys A = 5 in cells 0 and 2, B = 7 in cells 1 and 2. Entries (5, 1),
(7, 1), (12, 2): both are found in one sweep. With B in cells 0 and 2 instead, entries (12, 2),
(0, 0), (12, 2) have no single key: both stay unresolved.

A launch sweeps over its keys several times, so that it follows what other programs free meanwhile,
and raises a flag for the next launch if it recovered any; launches after the last progress only
read that flag. The number of launches comes from the rounds that peeling takes if each one sees the
result of the last, measured at the sizes of ``plan_layout``: at most 2 more than 2.3 times the
fourth root of the number of keys (20 for 4096 keys, 72 for a million). Half of the sweeps are
expected to be as good as such a round. Should that not be enough, one program finishes the rest,
however many rounds it takes: what stays unresolved is what no order of peeling can recover.
"""

from __future__ import annotations

import math

import triton
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import jit, tl
from .scalar import cell_of
from .table import FLAGS, Table

# One key per thread: with more, Triton moves them between threads at every step.
BLOCK, WARPS = 128, 4
FINISH_BLOCK, FINISH_WARPS = 512, 16
PROGRAMS = 2048
_SWEEPS = 8


def synchronous_rounds(layout: SketchLayout) -> int:
    """Rounds that peeling ``layout.keys`` keys takes, measured, if each round sees the last."""
    return math.ceil(2.3 * layout.keys**0.25) + 2


def launches(layout: SketchLayout) -> int:
    """Wide launches before one program finishes the rest."""
    return min(FLAGS - 1, 2 + triton.cdiv(2 * synchronous_rounds(layout), _SWEEPS))


@jit
def _sweep(entry, slot, key, values, keys, seed, partition, HASHES: tl.constexpr):
    """Recover those of ``key`` (-1 for none) that lie alone in a cell; which ones."""
    todo = key >= 0
    found = key < -1
    value = tl.zeros(key.shape, tl.int64)
    for i in tl.static_range(HASHES):
        cell = cell_of(key.to(tl.uint32, bitcast=True), seed, partition, i)
        # Volatile reads go to where the atomics of all programs land.
        seen = tl.load(entry + cell, mask=todo, other=0, volatile=True)
        alone = todo & ((seen & 0xFFFFFFFF) == 1)
        value = tl.where(alone, seen >> 32, value)
        found = found | alone
    taken = -(value << 32) - 1
    for i in tl.static_range(HASHES):
        cell = cell_of(key.to(tl.uint32, bitcast=True), seed, partition, i)
        tl.atomic_add(entry + cell, taken, mask=found, sem="relaxed")
    tl.store(values + slot, value.to(tl.int32), mask=found)
    tl.store(keys + slot, tl.full(key.shape, -1, tl.int32), mask=found)
    return found


@jit
def _pass(
    entry, keys, values, begin, total, stride, seed, partition,
    BLOCK: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    """Sweep once over the keys from ``begin``, ``BLOCK`` in every ``stride``.

    Returns: keys recovered, keys still open.
    """
    recovered = tl.zeros([], tl.int32)
    still_open = tl.zeros([], tl.int32)
    for start in range(begin, total, stride):
        slot = start + tl.arange(0, BLOCK)
        key = tl.load(keys + slot, mask=slot < total, other=-1, volatile=True)
        todo = tl.sum((key >= 0).to(tl.int32), 0)
        if todo > 0:
            found = _sweep(entry, slot, key, values, keys, seed, partition, HASHES)
            done = tl.sum(found.to(tl.int32), 0)
            recovered += done
            still_open += todo - done
    return recovered, still_open


@jit(do_not_specialize=["launch", "partition", "seed", "stats"])
def peel_kernel(
    entry, keys, values, flags, stats, seed, launch, partition,
    BLOCK: tl.constexpr, SWEEPS: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    if tl.load(flags + launch) == 0:
        return
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    total = tl.load(stats)
    seed_value = tl.load(seed)
    recovered = tl.zeros([], tl.int32)
    still_open = tl.full([], 1, tl.int32)
    sweep = 0
    while (sweep < SWEEPS) & (still_open > 0):
        done, still_open = _pass(
            entry, keys, values, begin, total, stride, seed_value, partition, BLOCK, HASHES
        )
        recovered += done
        sweep += 1
    if recovered > 0:
        tl.store(flags + launch + 1, 1)


@jit(do_not_specialize=["launch", "partition", "seed", "stats"])
def finish_kernel(
    entry, keys, values, flags, stats, seed, launch, partition,
    BLOCK: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    begin = tl.zeros([], tl.int64)
    total = tl.load(stats)
    seed_value = tl.load(seed)
    recovered = tl.load(flags + launch)
    while recovered > 0:
        recovered, _still_open = _pass(
            entry, keys, values, begin, total, BLOCK, seed_value, partition, BLOCK, HASHES
        )
        # No progress means none is possible only if this pass saw all of the last one's work.
        tl.debug_barrier()


def peel_integers(seed: Tensor, stats: Tensor, table: Table, *, layout: SketchLayout) -> None:
    """Recover what can be recovered: ``table.values`` by slot, ``table.keys`` -1 where done."""
    if layout.groups == 0:
        return
    last = launches(layout)
    programs = min(PROGRAMS, max(1, triton.cdiv(layout.keys, BLOCK)))
    arguments = (table.entry, table.keys, table.values, table.flags, stats, seed)
    for launch in range(last):
        peel_kernel[(programs,)](
            *arguments, launch, layout.partition,
            BLOCK=BLOCK, SWEEPS=_SWEEPS, HASHES=layout.hashes,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    finish_kernel[(1,)](
        *arguments, last, layout.partition, BLOCK=FINISH_BLOCK, HASHES=layout.hashes,
        num_warps=FINISH_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
