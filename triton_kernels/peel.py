"""Peel: a cell with one key left holds that key's symbol; take the key out of its other cells.

An entry with one key left names the key and its symbol (see :mod:`.table`). The program that clears
the key's bit owns the key: it writes the key's elements, and takes the key out of its other cells
by atomic additions, whose results say which of these cells have one key left now. So the work is
one step per cell that ever comes to hold one key, for any number of rounds. Exactly one program
finds each such cell. No order of peeling can recover the keys that are left at the end, and symbols
do not depend on the order.

Worked example (2 hashes): key A = 5 is in cells 0 and 2, B = 7 in cells 1 and 2. Cells 0 and 1 have
one key each. The program that takes A out of cell 2 leaves (7, 1) there; the one that then takes B
out leaves (0, 0). If both run at once, the first finds that cell 2 holds B. Then either the second
has already cleared the bit of B, or the first clears it.

First, a kernel lists the cells that hold one key. Then programs of one warp take their shares of
the list. Each works through its cells and the cells that these free, in its own stash, 32 cells per
step, until none is left. More than one launch is needed only to balance programs: if few keys are
left to start from, few programs would do all of the rest. So after some steps, programs hand their
cells to the next launch, which divides them among all programs. The number of launches comes from
the number of rounds in which each sees the result of the last, measured at the sizes of
``plan_layout``; the last launch has no limit. Cells that do not fit a stash also go to the next
launch, and finally to one program, which works through its list until it is empty; normally there
are none. A cell comes to hold one key only once, so a list has room for all.

With split entries, a value is taken out before the degree. The addition to the degree releases it,
and the read of an entry, which is also atomic, acquires it. So a program that finds degree one also
finds the value.
"""

from __future__ import annotations

import math

from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import cdiv, division, jit, tl
from .scalar import lane_sums
from .table import (
    LANES_OF_A_STEP,
    LISTS,
    ROOM,
    Table,
    cell_at,
    contribution,
    hash_of,
    key_of,
    packed,
    peeling_programs,
    pop,
    push,
)

SCAN_BLOCK, SCAN_WARPS = 1024, 4
FINISH_BLOCK, FINISH_WARPS = 512, 16
# Steps of a program before it hands its cells over.
_STEPS = 64
_NO_LIMIT = (1 << 31) - 1
# Arguments whose alignment makes no difference.
_PLAIN = ["launch", "limit", "partition", "inverse", "words", "divisor", "seed", "step"]


def launches(layout: SketchLayout) -> int:
    """Number of wide launches before one program finishes the rest."""
    # As measured, if each round sees the last one.
    rounds = math.ceil(2.3 * layout.keys**0.25) + 2
    return min(LISTS - 1, max(1, cdiv(3 * rounds, 2 * _STEPS)))


@jit
def _take_out(
    entry, value, marks, out, item, seed, step, partition, inverse, n, words, divisor,
    HASHES: tl.constexpr, LANES: tl.constexpr, PACKED: tl.constexpr, RAW: tl.constexpr,
    DIVIDE: tl.constexpr,
):  # fmt: skip
    """Write the keys alone in the cells ``item`` (-1 for none), unless another program does, and
    take them out of their other cells.

    Returns: the keys, uint32; bit i is set if a key's cell i has one key left.
    """
    if PACKED:
        # Volatile reads see the atomics of all programs.
        seen = tl.load(entry + item, mask=item >= 0, other=0, volatile=True)
        alone = (seen & 0xFFFF) == 1
        key = key_of(item, (seen >> 16).to(tl.uint32), seed, partition, inverse, HASHES)
        symbol = (seen >> 32).to(tl.int32)
    else:
        none = tl.zeros(item.shape, tl.int64)
        # It acquires the value below, which the addition that left one key here released.
        seen = tl.atomic_add(entry + item, none, mask=item >= 0, sem="acquire")
        alone = (item >= 0) & ((seen & 0xFFFFFFFF) == 1)
        key = (seen >> 32).to(tl.uint32)
        symbol = tl.load(value + item, mask=alone, other=0, volatile=True)
    bit = (tl.full(item.shape, 1, tl.uint32) << (key & 31)).to(tl.int32, bitcast=True)
    was = tl.atomic_and(marks + (key >> 5).to(tl.int64), ~bit, mask=alone, sem="relaxed")
    ours = alone & ((was & bit) != 0)
    if RAW:
        tl.store(out + key.to(tl.int64), symbol, mask=ours)
    else:
        x = lane_sums(symbol, LANES).to(tl.float32) * tl.load(step)  # [BLOCK, LANES]
        x = tl.div_rn(x, tl.zeros_like(x) + divisor) if DIVIDE else x * divisor
        j = tl.expand_dims(key.to(tl.int64), 1) * LANES + tl.arange(0, LANES)
        # If a rank sent poison, the output is NaN and stays NaN.
        there = tl.expand_dims(ours, 1) & (j < tl.where(tl.load(marks + words) == 0, n, 0))
        tl.store(out + j, x.to(out.dtype.element_ty), mask=there)

    freed = tl.zeros(item.shape, tl.int32)
    for i in tl.static_range(HASHES):
        h = hash_of(key, seed, i)
        cell = cell_at(h, partition, i)
        other = ours & (cell != item)
        taken = -contribution(key, h, PACKED)
        if PACKED:
            taken -= symbol.to(tl.int64) << 32
            left = tl.atomic_add(entry + cell, taken, mask=other, sem="relaxed") + taken
            single = other & ((left & 0xFFFF) == 1)
        else:
            tl.atomic_add(value + cell, -symbol, mask=other, sem="relaxed")
            left = tl.atomic_add(entry + cell, taken, mask=other, sem="acq_rel") + taken
            single = other & ((left & 0xFFFFFFFF) == 1)
        freed |= single.to(tl.int32) << i
    return key, freed


@jit
def _number(freed, HASHES: tl.constexpr):
    """Numbers of bits set in ``freed``."""
    number = tl.zeros(freed.shape, tl.int32)
    for i in tl.static_range(HASHES):
        number += (freed >> i) & 1
    return number


@jit
def _push_freed(place, freed, key, seed, partition, HASHES: tl.constexpr):
    """Store the cells of ``key`` whose bits are set in ``freed``, one after the other."""
    number = _number(freed, HASHES)
    slot = tl.cumsum(number, 0) - number
    for i in tl.static_range(HASHES):
        some = ((freed >> i) & 1) != 0
        cell = cell_at(hash_of(key, seed, i), partition, i)
        tl.store(place + slot, cell, mask=some)
        slot += (freed >> i) & 1


@jit(do_not_specialize=["cells"])
def singles_kernel(
    entry, lists, pending, cells, BLOCK: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(entry + cell, mask=cell < cells, other=0)
    single = ((seen & (0xFFFF if PACKED else 0xFFFFFFFF)) == 1).to(tl.int32)
    total = tl.sum(single, 0)
    if total > 0:
        place = lists + tl.atomic_add(pending, total, sem="relaxed")
        tl.store(place + tl.cumsum(single, 0) - single, cell, mask=single != 0)


@jit(do_not_specialize=_PLAIN)
def peel_kernel(
    entry, value, marks, stash, lists, pending, seed, step, out, launch, limit, partition, inverse,
    cells, n, words, divisor,
    BLOCK: tl.constexpr, ROOM: tl.constexpr, HASHES: tl.constexpr, LANES: tl.constexpr,
    PACKED: tl.constexpr, RAW: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    size = tl.load(pending + launch)
    share = tl.cdiv(size, tl.num_programs(0))
    begin = tl.minimum(tl.program_id(0) * share, size)
    end = tl.minimum(begin + share, size)
    if begin == end:
        return
    source = lists + (launch % 2).to(tl.int64) * cells
    target = lists + ((launch + 1) % 2).to(tl.int64) * cells
    pending += launch + 1
    mine = stash + tl.program_id(0) * ROOM
    seed_value = tl.load(seed)
    count = tl.zeros([], tl.int32)
    steps = tl.zeros([], tl.int32)
    while (begin < end) | ((count > 0) & (steps < limit)):
        if (begin < end) & (count < BLOCK):
            at = begin + tl.arange(0, BLOCK)
            cell = tl.load(source + at, mask=at < end, other=-1)
            count = push(mine, count, cell, at < end)
            begin += BLOCK
            tl.debug_barrier()
        else:
            item = pop(mine, count, BLOCK)
            count = tl.maximum(count - BLOCK, 0)
            key, freed = _take_out(
                entry, value, marks, out, item, seed_value, step, partition, inverse, n, words,
                divisor, HASHES, LANES, PACKED, RAW, DIVIDE,
            )  # fmt: skip
            more = tl.sum(_number(freed, HASHES), 0)
            tl.debug_barrier()
            if count + more <= ROOM:
                _push_freed(mine + count, freed, key, seed_value, partition, HASHES)
                count += more
            else:
                place = target + tl.atomic_add(pending, more, sem="relaxed")
                _push_freed(place, freed, key, seed_value, partition, HASHES)
            tl.debug_barrier()
            steps += 1
    if count > 0:
        place = target + tl.atomic_add(pending, count, sem="relaxed")
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            item = tl.load(mine + at, mask=at < count, other=-1, volatile=True)
            tl.store(place + at, item, mask=at < count)


@jit(do_not_specialize=_PLAIN)
def finish_kernel(
    entry, value, marks, lists, pending, seed, step, out, launch, partition, inverse,
    cells, n, words, divisor,
    BLOCK: tl.constexpr, HASHES: tl.constexpr, LANES: tl.constexpr, PACKED: tl.constexpr,
    RAW: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    size = tl.load(pending + launch)
    if size == 0:
        return
    seed_value = tl.load(seed)
    turn = launch.to(tl.int64)
    while size > 0:
        source = lists + turn % 2 * cells
        target = lists + (turn + 1) % 2 * cells
        count = tl.zeros([], tl.int32)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            item = tl.load(source + at, mask=at < size, other=-1, volatile=True)
            key, freed = _take_out(
                entry, value, marks, out, item, seed_value, step, partition, inverse, n, words,
                divisor, HASHES, LANES, PACKED, RAW, DIVIDE,
            )  # fmt: skip
            _push_freed(target + count, freed, key, seed_value, partition, HASHES)
            count += tl.sum(_number(freed, HASHES), 0)
        tl.debug_barrier()
        size = count
        turn += 1


def peel_table(
    seed: Tensor,
    step: Tensor,
    out: Tensor,
    table: Table,
    layout: SketchLayout,
    divisor: int,
    raw: bool,
) -> None:
    """Write the keys that can be recovered to ``out``, which was cleared: ``[n]`` elements, or if
    ``raw``, ``[groups]`` symbols. The bits of the others stay set."""
    factor, divide = division(divisor)
    t, last = table, launches(layout)
    numbers = (
        layout.partition, (1 << 63) // layout.partition if packed(layout) else 1 << 40,
        layout.cells, out.shape[0], layout.words, factor,
    )  # fmt: skip
    shape = {
        "HASHES": layout.hashes, "LANES": layout.symbol.lanes, "PACKED": packed(layout),
        "RAW": raw, "DIVIDE": divide,
    }  # fmt: skip
    singles_kernel[(cdiv(layout.cells, SCAN_BLOCK),)](
        t.entry, t.lists, t.pending, layout.cells,
        BLOCK=SCAN_BLOCK, PACKED=packed(layout), num_warps=SCAN_WARPS,
    )  # fmt: skip
    for launch in range(last):
        peel_kernel[(peeling_programs(layout),)](
            t.entry, t.value, t.open, t.stash, t.lists, t.pending, seed, step, out,
            launch, _STEPS if launch < last - 1 else _NO_LIMIT, *numbers,
            BLOCK=LANES_OF_A_STEP, ROOM=ROOM, num_warps=1, **shape,
        )  # fmt: skip
    finish_kernel[(1,)](
        t.entry, t.value, t.open, t.lists, t.pending, seed, step, out, last, *numbers,
        BLOCK=FINISH_BLOCK, num_warps=FINISH_WARPS, **shape,
    )  # fmt: skip
