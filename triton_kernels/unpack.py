"""Unpack: add up the sparse messages of all ranks in their order, divide, front to back.

Per element ``total / divisor``, where ``total`` starts from 0 and takes ``q * s`` from every
message that has the element's group, in the order of the messages, all in float32; where the
divisor is a power of two, multiplying by its inverse gives the same bits. If any poison word is
set, all is NaN.

A program owns a tile of the output. The groups that a message has there are neighbours in its
values, from the rank of the tile on: they are decoded once, and put into shared memory, beside
zeros. A thread owns 32 neighbouring elements: it walks over their groups' bits, counts up its slot,
and adds the slot's values, or its zeros, which change nothing, since a total is never -0. A tile
with more values than are decoded at once takes several turns.

Worked example (groups of 2, two messages, divisor 2): group 3 is the second group of the first
message, which has the entries 2 and 3 for it, say 0.5 and -1, and the first of the second, with
the entries 0 and 1, say 1 and 1: elements 6 and 7 become 0.75 and 0.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tagc.ops.packed import POISON, PackedLayout, index_of, values_of

from .codes import code_of, scale_of
from .device import on_device_of
from .jit import jit, tl
from .rank import RANK_BLOCK, rank, run_start
from .read_index import read_index
from .scalar import load_bitmap
from .scratch import buffer

# Elements of a thread and of a program.
_EACH = 32
_WARPS = 4
_TILE = 32 * _WARPS * _EACH
# Arguments whose alignment makes no difference.
_PLAIN = [
    *("poison", "starts", "scales", "codes", "R", "groups", "words", "capacity"),
    *("divisor", "poison_stride", "bitmap_stride", "scales_stride", "codes_stride"),
    *("offset_stride", "starts_stride"),
]


@jit
def decode(scales, codes, first, entries, BITS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr):
    """``q * s`` of the ``N`` entries from ``first`` on, 0 where there are no more."""
    COLUMNS: tl.constexpr = BLOCK * BITS // 32
    k = tl.arange(0, N)
    there = k < tl.minimum(entries - first, N).to(tl.int32)
    block = first // BLOCK
    # Unsigned, so that dividing by a power of two is a shift.
    e = (first % BLOCK).to(tl.uint32) + k.to(tl.uint32)
    s = scale_of(tl.load(scales + block + e // BLOCK, mask=there, other=0))
    column = e // BLOCK * COLUMNS + e % COLUMNS
    code = tl.load(codes + block * COLUMNS + column, mask=there, other=0)
    return code_of(code, (e % BLOCK // COLUMNS).to(tl.int32), BITS) * s


@jit
def beside_zeros(values, GROUP: tl.constexpr):
    """Before each group of ``[N]`` values as many zeros, ``[2 * N]``."""
    values = tl.reshape(values, [values.numel // GROUP, GROUP])
    pairs = tl.permute(tl.join(tl.zeros_like(values), values), [0, 2, 1])
    return tl.reshape(pairs, [pairs.numel])


@jit
def in_order(parts, N: tl.constexpr):
    """``N`` tensors ``[T]`` as one, ``[T * N]``: all of the first thread, then the next one's."""
    if N == 1:
        return tl.reshape(parts[0], [parts[0].numel])
    else:
        # The last pair to be joined are neighbours.
        HALF: tl.constexpr = N // 2
        joined = ()
        for i in tl.static_range(HALF):
            joined += (tl.join(parts[i], parts[i + HALF]),)
        return in_order(joined, HALF)


@jit
def load_halves(
    bitmap, tile, groups, GROUP: tl.constexpr, EACH: tl.constexpr, THREADS: tl.constexpr
):  # fmt: skip
    """Bits of each thread's groups, ``[THREADS]`` uint32: the first half of them from bit 0 on, the
    second half from bit 16 on."""
    COUNT: tl.constexpr = EACH // GROUP
    HALF: tl.constexpr = COUNT // 2
    t = tile * THREADS + tl.arange(0, THREADS)
    word = load_bitmap(bitmap, t // (32 // COUNT), groups)
    if COUNT == 32:
        return word
    else:
        word = word >> (t % (32 // COUNT) * COUNT).to(tl.uint32)
        if HALF == 0:
            return word & 1
        else:
            LOWER: tl.constexpr = (1 << HALF) - 1
            return (word & LOWER) | ((word & (LOWER << HALF)) << (16 - HALF))


@jit
def count_halves(halves):
    """Number of set bits of the lower and of the upper half, int32."""
    x = halves - ((halves >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = (x + (x >> 8)) & 0x00FF00FF
    return (x & 0xFFFF).to(tl.int32), (x >> 16).to(tl.int32)


@jit
def places(halves, lower, upper, begin, SLOTS: tl.constexpr, GROUP: tl.constexpr,
           EACH: tl.constexpr):  # fmt: skip
    """Where the elements of threads are in :func:`beside_zeros` of the slots from ``begin`` on.

    Slot ``begin + k`` has its zeros at ``2 * k``, its values at ``2 * k + 1``, in groups; other
    slots than ``SLOTS`` ones share the zeros that follow. Both halves are counted at once, in
    bytes, so that a place is a mask or a shift, and a minimum away.

    Args:
        halves: ``[T]`` uint32, see :func:`load_halves`.
        lower, upper: ``[T]`` int32, slot of the first group of each half; in bytes, doubled, they
            fit 16 bits.

    Returns:
        ``[T * EACH]`` int32.
    """
    HALF: tl.constexpr = (EACH // GROUP + 1) // 2
    BYTES: tl.constexpr = 4 * GROUP
    LAST: tl.constexpr = 2 * SLOTS * BYTES
    at = ((upper << 16) | lower).to(tl.uint32, bitcast=True) * (2 * BYTES)
    back = begin.to(tl.uint32, bitcast=True) * (2 * BYTES)
    low, high = (), ()
    for i in tl.static_range(HALF):
        here = ((halves >> i) & 0x10001) * BYTES
        at += here
        first = (tl.minimum((at & 0xFFFC) - back, LAST) >> 2).to(tl.int32)
        second = (tl.minimum((at >> 16) - back, LAST) >> 2).to(tl.int32)
        for lane in tl.static_range(GROUP):
            low += (first + lane,)
            high += (second + lane,)
        at += here
    return in_order(low + high if GROUP < EACH else low, EACH)


@jit(do_not_specialize=_PLAIN)
def unpack_kernel(
    poison, bitmap, offset, starts, scales, codes, out, n, R, groups, words, capacity, divisor,
    poison_stride, bitmap_stride, offset_stride, starts_stride, scales_stride, codes_stride,
    GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr,
    EACH: tl.constexpr, VALUES: tl.constexpr, RANK_BLOCK: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = THREADS * EACH
    RUNS: tl.constexpr = RANK_BLOCK * 32 * GROUP // TILE  # tiles of a block of ranks
    SLOTS: tl.constexpr = VALUES // GROUP - 1
    tile = tl.program_id(0)
    entries = capacity.to(tl.int64) * GROUP
    total = tl.zeros([TILE], tl.float32)
    poisoned = tl.zeros([], tl.int32)
    left, begin = R, tl.zeros([], tl.int32)
    # Turns of messages in one loop: of a loop in a loop, the compiler keeps all places at hand.
    while left > 0:
        poisoned |= tl.load(poison)
        start = run_start(offset, starts, tile, RUNS)
        slots = run_start(offset, starts, tile + 1, RUNS) - start
        halves = load_halves(bitmap, tile, groups, GROUP, EACH, THREADS)
        below, above = count_halves(halves)
        upper = tl.cumsum(below + above, 0) - above
        first = (start + begin).to(tl.int64) * GROUP
        values = decode(scales, codes, first, entries, BITS, BLOCK, VALUES)
        place = places(halves, upper - below, upper, begin, SLOTS, GROUP, EACH)
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
    total = tl.div_rn(total, tl.zeros_like(total) + divisor) if DIVIDE else total * divisor
    total = tl.where(poisoned != 0, float("nan"), total)
    start = tile.to(tl.int64) * TILE
    j = tl.arange(0, TILE)
    tl.store(out + start + j, total.to(out.dtype.element_ty), mask=j < n - start)


def _values(layout: PackedLayout) -> int:
    """Values of a message and a tile that are decoded at once: those of a usual tile, and more, as
    far as the registers go."""
    usual = int(1.2 * _TILE * layout.capacity / max(1, layout.groups)) + layout.group
    return min(_TILE // 2, max(32 * _WARPS, triton.next_power_of_2(usual)))


@on_device_of("out")
def unpack(
    message: Tensor,
    support: Tensor | None,
    out: Tensor,
    *,
    layout: PackedLayout,
    divisor: int,
) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.unpack`."""
    if layout.numel == 0:
        return
    R, values = message.shape[0], layout.values
    index = index_of(message, layout)
    if support is not None:
        bitmap = support[None]
    elif layout.low_bits:
        bitmap = buffer("received", (R, layout.bitmap_words), torch.int32, out.device, layout)
        read_index(index, bitmap, layout=layout)
    else:
        bitmap = index
    step = _TILE // (32 * layout.group)
    ranks = rank(bitmap, layout.groups, "bitmap", layout=layout, step=step)
    # The support's marks and their ranks are the same for every message.
    bitmap, offset, starts = (x.expand(R, -1) for x in (bitmap, ranks.offset, ranks.starts))
    received = values_of(message, layout)
    scales, codes = received.view(torch.int16), received[:, values.scale_words :]
    divide = divisor & (divisor - 1) != 0
    unpack_kernel[(triton.cdiv(layout.bitmap_words, step),)](
        message[:, POISON], bitmap, offset, starts, scales, codes, out, layout.numel, R,
        layout.groups, layout.bitmap_words, layout.capacity,
        float(divisor) if divide else 1.0 / divisor,
        message.stride(0), bitmap.stride(0), offset.stride(0), starts.stride(0),
        scales.stride(0), codes.stride(0),
        GROUP=layout.group, BITS=values.bits, BLOCK=values.block, THREADS=32 * _WARPS, EACH=_EACH,
        VALUES=_values(layout), RANK_BLOCK=RANK_BLOCK, DIVIDE=divide,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
