"""Unpack: add up the sparse messages of all ranks in their order, divide, front to back.

An element is ``total / divisor``, where ``total`` starts from 0 and adds ``q * s`` from every
message that has the element's group, in the order of the messages, all in float32. If the divisor
is a power of two, multiplying by its inverse gives the same bits. If any poison word is set,
everything is NaN.

A program owns a tile of the output. A message's groups in this tile are neighbours in its values,
from the rank of the tile on. They are decoded once (:mod:`.entries`) into shared memory, beside
zeros. A thread owns neighbouring elements: it walks over their groups' bits (:mod:`.places`) and
adds a slot's values, or its zeros, which change nothing because a total is never -0. A tile with
more values than are decoded at once takes several turns; each thread adds in one of them.

Worked example (groups of 2, two messages, divisor 2): group 3 is the second group of the first
message, with the entries 2 and 3, say 0.5 and -1, and the first group of the second message, with
the entries 0 and 1, say 1 and 1. Elements 6 and 7 become 0.75 and 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tagc.ops.packed import POISON, PackedLayout, index_of, values_of

from .device import on_device_of
from .entries import beside_zeros, decode_blocks, decode_entries
from .jit import jit, tl
from .places import count_halves, load_halves, places
from .rank import RANK_BLOCK, rank, run_start
from .read_index import read_index
from .scratch import buffer
from .sizes import cdiv, next_power_of_2

# Elements of a thread and of a program.
_EACH = 64
_WARPS = 4
_TILE = 32 * _WARPS * _EACH
# Blocks up to this size are decoded whole; of larger blocks, single entries are decoded.
_WHOLE = 512
# The most values that are decoded at once; beside zeros, their places in bytes fit 16 bits. Single
# entries take more registers, because each has its own address.
_MOST, _MOST_SINGLE = 4096, 2048
# The usual share of a message's capacity that is filled.
_USUAL = 0.95
# Arguments whose alignment makes no difference.
_PLAIN = [
    *("poison", "starts", "scales", "codes", "R", "groups", "capacity", "blocks", "divisor"),
    *("mask", "poison_stride", "bitmap_stride", "offset_stride", "starts_stride"),
    *("scales_stride", "codes_stride"),
]


@jit(do_not_specialize=_PLAIN)
def unpack_kernel(
    poison, bitmap, offset, starts, scales, codes, out, n, R, groups, capacity, blocks, divisor,
    mask, poison_stride, bitmap_stride, offset_stride, starts_stride, scales_stride, codes_stride,
    GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr,
    EACH: tl.constexpr, VALUES: tl.constexpr, SLOTS: tl.constexpr, WHOLE: tl.constexpr,
    RANK_BLOCK: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = THREADS * EACH
    RUNS: tl.constexpr = RANK_BLOCK * 32 * GROUP // TILE  # tiles of a block of ranks
    tile = tl.program_id(0)
    entries = capacity.to(tl.int64) * GROUP
    total = tl.zeros([TILE], tl.float32)
    poisoned = tl.zeros([], tl.int32)
    left, begin = R, tl.zeros([], tl.int32)
    # One loop over the turns of all messages: in a nested loop, the compiler would keep all places
    # in registers.
    while left > 0:
        poisoned |= tl.load(poison)
        start = run_start(offset, starts, tile, RUNS)
        slots = run_start(offset, starts, tile + 1, RUNS) - start
        halves = load_halves(bitmap, tile, groups, GROUP, EACH, THREADS)
        below, above = count_halves(halves)
        lower = tl.cumsum(below + above, 0) - above - below - begin
        # A thread adds all its slots in one turn, and none past the capacity (a damaged message).
        now = lower.to(tl.uint32, bitcast=True) < SLOTS
        now &= lower + below + above <= capacity - start - begin
        marked = ()
        for i in tl.static_range(len(halves)):
            marked += (tl.where(now, halves[i], 0),)
        lower = tl.where(now, lower, 0)
        first = (start + begin).to(tl.int64) * GROUP
        if WHOLE:
            lower += (first % BLOCK // GROUP).to(tl.int32)
            values = decode_blocks(scales, codes, first // BLOCK, blocks, mask, BITS, BLOCK, VALUES)
        else:
            values = decode_entries(scales, codes, first, entries, BITS, BLOCK, VALUES)
        place = places(marked, lower, lower + below, GROUP, EACH)
        total += tl.gather(beside_zeros(values, GROUP), place, 0)
        begin += SLOTS
        if begin >= slots:
            begin = tl.zeros([], tl.int32)
            left -= 1
            poison += poison_stride
            bitmap += bitmap_stride
            offset += offset_stride
            starts += starts_stride
            scales += scales_stride
            codes += codes_stride
    # A poisoned sum becomes NaN.
    divisor = tl.where(poisoned != 0, float("nan"), divisor)
    total = tl.div_rn(total, tl.zeros_like(total) + divisor) if DIVIDE else total * divisor
    start = tile.to(tl.int64) * TILE
    j = tl.arange(0, TILE)
    tl.store(out + start + j, total.to(out.dtype.element_ty), mask=j < n - start)


def turn_of(layout: PackedLayout) -> tuple[int, int, bool]:
    """For a message and a tile: number of values decoded at once, number of slots added, and
    whether blocks are decoded whole. Most tiles take one turn (with blocks that are not decoded
    whole, if at most a quarter of the groups is kept)."""
    group, block = layout.group, layout.values.block
    whole = block <= _WHOLE
    # Slots of a block before the first one, and the slots of the last thread.
    more = (block // group - 1 if whole else 0) + _EACH // group
    mean = _USUAL * layout.capacity / max(1, layout.groups) * (_TILE // group)
    usual = math.ceil(mean + 2 * math.sqrt(mean * (1 - mean * group / _TILE))) + 1
    most = _MOST if whole else _MOST_SINGLE
    values = min(most, next_power_of_2((usual + more) * group))
    return values, values // group - more, whole


@on_device_of("out")
def unpack(message: Tensor, out: Tensor, *, layout: PackedLayout, divisor: int) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.unpack`."""
    if layout.numel == 0:
        return
    R, values = message.shape[0], layout.values
    index = index_of(message, layout)
    if layout.low_bits:
        bitmap = buffer("received", (R, layout.bitmap_words), torch.int32, out.device, layout)
        read_index(index, bitmap, layout=layout)
    else:
        bitmap = index
    step = _TILE // (32 * layout.group)
    ranks = rank(bitmap, layout.groups, "bitmap", layout=layout, step=step)
    received = values_of(message, layout)
    scales, codes = received.view(torch.int16), received[:, values.scale_words :]
    divide = divisor & (divisor - 1) != 0
    decoded, slots, whole = turn_of(layout)
    unpack_kernel[(cdiv(layout.bitmap_words, step),)](
        message[:, POISON], bitmap, ranks.offset, ranks.starts, scales, codes, out, layout.numel, R,
        layout.groups, layout.capacity, values.blocks,
        float(divisor) if divide else 1.0 / divisor, (1 << values.bits) - 1,
        message.stride(0), bitmap.stride(0), ranks.offset.stride(0), ranks.starts.stride(0),
        scales.stride(0), codes.stride(0),
        GROUP=layout.group, BITS=values.bits, BLOCK=values.block, THREADS=32 * _WARPS, EACH=_EACH,
        VALUES=decoded, SLOTS=slots, WHOLE=whole, RANK_BLOCK=RANK_BLOCK, DIVIDE=divide,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
