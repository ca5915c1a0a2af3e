"""Exact changes of 16-bit numbers: choose widths, write messages, and turn old rows into new ones.
:mod:`tagc.ops.exact` has the format.

A program has one block, whose elements, span and place in the row are constants of the layout.

Measuring takes four launches: count elements by class and length of ``z + 1``; choose the widths
of each class; count the bits of each block; and sum these up.

Encoding takes two. The first writes the head: total, masks and widths. In the second, each program
clears its block's words, which are its own, and then sets bits, in no fixed order. Two neighbours
of level 1 have at most 30 bits, and are set together.

Decoding takes two. The first has a program for each message, which reads the tables of widths and
finds where blocks begin. In the second, each program decodes a block of a message: the numbers of
all elements, and then those of the elements in the block's list.

Worked examples: bfloat16 1.0 has the bits 0x3F80 and the class 127 % 32 = 31. The next larger
number is ``z = 2`` away, and ``z + 1 = 3`` has a length of 2 bits. A class of 64 elements, of which
62 have the length 1 and two the length 2, is listed, and has 2 bits in level 2: that takes
2 * (5 + 1) + (64 >> 5) + 2 * 2 = 18 bits, and one bit for each element and then 2 bits would take
68.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tagc.ops.exact import CLASSES, MANTISSA, ExactLayout

from .jit import cdiv, jit, on_device_of, tl, torch_call
from .scratch import buffer

# Blocks that a program counts before it adds to the counts of all.
_EACH = 16
# Numbers that the only program of a launch adds up at a time, and spans that it reads.
_SCAN, _SCAN_WARPS, _SPANS = 4096, 8, 16
_BINS = 32 * CLASSES


@cache
def where_of(layout: ExactLayout, device: torch.device) -> Tensor:
    """First element, number of elements and span of each block ``[3, blocks]`` int64. The first
    call for a layout must not be inside the capture of a graph."""
    if device.type == "meta":
        return torch.empty(3, layout.blocks, dtype=torch.int64, device=device)
    found, first = [], 0
    for span, size in enumerate(layout.spans):
        for at in range(0, size, layout.block):
            found.append((first + at, min(layout.block, size - at), span))
        first += size
    rows = torch.tensor(found, dtype=torch.int64, device="cpu").view(-1, 3)
    return rows.T.contiguous().to(device)


def warps_of(block: int) -> int:
    """Warps of a program: 4 elements a thread. With 8, decoding a block's list would need more
    registers than leave room for many programs."""
    return max(1, block // 128)


@jit
def load_patterns(row, j, inside):
    """Bit patterns of elements of a row of int16, from 0 on, as int32."""
    return tl.load(row + j, mask=inside, other=0).to(tl.int32) & 0xFFFF


@jit
def ordered(k):
    """Numbers in order of bit patterns, modulo 2**16, and back."""
    return tl.where(k >= 0x8000, k ^ 0x7FFF, k)


@jit
def change(new, old):
    """``z`` of bit patterns."""
    q = (ordered(new) - ordered(old)) & 0xFFFF
    return tl.where(q < 0x8000, 2 * q, 0x1FFFF - 2 * q)


@jit
def changed(old, z):
    """The new bit pattern."""
    q = tl.where((z & 1) > 0, 0xFFFF - (z >> 1), z >> 1)
    return ordered((ordered(old) + q) & 0xFFFF)


@jit
def length(x):
    """Number of bits of a positive int32 below 2**24."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126


@jit
def before(x):
    """Sums of all numbers before each."""
    return tl.cumsum(x, 0) - x


@jit
def ones(width):
    """The largest number of so many bits."""
    return (1 << width) - 1


@jit
def elias_fano(n, fill):
    """Lower bits of each of ``n`` places in a block, and the bits of all upper parts."""
    low = length(fill // tl.maximum(n, 1)) - 1
    return low, tl.where(n > 0, n + ((fill - 1) >> low), 0)


@jit
def put(block, at, value, mask):
    """Set bits of a block that were zeros; numbers of at most 30 bits."""
    value = value.to(tl.uint32)
    shift = (at & 31).to(tl.uint32)
    low = (value << shift).to(tl.int32, bitcast=True)
    high = ((value >> 1) >> (31 - shift)).to(tl.int32, bitcast=True)
    word = block + (at >> 5)
    tl.atomic_or(word, low, mask=mask & (low != 0), sem="relaxed")
    tl.atomic_or(word + 1, high, mask=mask & (high != 0), sem="relaxed")


@jit
def get(block, words, at, width, mask):
    """Numbers of at most 16 bits of a block of ``words`` words, after which all bits are zeros;
    int32."""
    word = at >> 5
    shift = (at & 31).to(tl.uint32)
    low = tl.load(block + word, mask=mask & (word < words), other=0).to(tl.uint32, bitcast=True)
    more = mask & (word + 1 < words) & ((at & 31) + width > 32)
    high = tl.load(block + word + 1, mask=more, other=0).to(tl.uint32, bitcast=True)
    value = (low >> shift) | ((high << 1) << (31 - shift))
    return value.to(tl.int32, bitcast=True) & ones(width)


@jit(do_not_specialize=["blocks"])
def exact_counts_kernel(
    new, old, where, counts, blocks, EACH: tl.constexpr, BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * EACH
    bins = tl.arange(0, BINS)
    found = tl.zeros([BINS], tl.int32)
    span = tl.load(where + 2 * blocks + first)
    j = tl.arange(0, BLOCK)
    for b in range(first, tl.minimum(first + EACH, blocks)):
        other = tl.load(where + 2 * blocks + b)
        if other != span:
            tl.atomic_add(counts + span * BINS + bins, found, mask=found > 0, sem="relaxed")
            found = tl.zeros([BINS], tl.int32)
            span = other
        start, fill = tl.load(where + b), tl.load(where + blocks + b).to(tl.int32)
        inside = j < fill
        k = load_patterns(old + start, j, inside)
        z = change(load_patterns(new + start, j, inside), k)
        key = ((k >> MANTISSA) & 31) * 32 + length(z + 1)
        found += tl.histogram(tl.where(inside, key, 0), BINS)  # nothing has the length 0
    tl.atomic_add(counts + span * BINS + bins, found, mask=found > 0, sem="relaxed")


@jit
def exact_widths_kernel(counts, table):
    c = tl.program_id(0)
    lengths = tl.arange(0, 32)
    count = tl.load(counts + c * 32 + lengths)
    count = tl.where(lengths > 0, count, 0)
    number = tl.sum(count, 0)
    moved = tl.sum(tl.where(lengths > 1, count, 0), 0)
    number64, moved64 = number.to(tl.int64), moved.to(tl.int64)
    low = tl.full([], 0, tl.int64)
    for i in tl.static_range(1, 31):
        low += ((moved64 << i) <= number64).to(tl.int64)
    listed = tl.where(moved > 0, moved64 * (low + 1) + (number64 >> low), 0)
    entry = tl.arange(0, 256)
    b1, b2 = entry & 15, entry >> 4
    once = tl.maximum(b1, 1)
    twice = tl.maximum(once, b2)
    above = tl.sum(tl.where(lengths[None, :] > once[:, None], count[None, :], 0), 1).to(tl.int64)
    again = tl.sum(tl.where(lengths[None, :] > twice[:, None], count[None, :], 0), 1).to(tl.int64)
    bits = tl.where(b1 > 0, number64 * b1, listed) + above * b2 + 16 * again
    best = tl.min(bits * 256 + entry, 0)
    tl.store(table + c, (best & 255).to(tl.int32))
    tl.store(counts + c * 32, moved)  # for the total


@jit(do_not_specialize=["blocks"])
def exact_sizes_kernel(
    new, old, where, table, sizes, blocks, BLOCK: tl.constexpr, MANTISSA: tl.constexpr
):
    b = tl.program_id(0)
    start, fill = tl.load(where + b), tl.load(where + blocks + b).to(tl.int32)
    span = tl.load(where + 2 * blocks + b)
    j = tl.arange(0, BLOCK)
    inside = j < fill
    k = load_patterns(old + start, j, inside)
    z = change(load_patterns(new + start, j, inside), k)
    entry = tl.load(table + span * 32 + ((k >> MANTISSA) & 31), mask=inside, other=0)
    b1, b2 = entry & 15, entry >> 4
    escaped = inside & (z >= tl.maximum(ones(b1), 1))
    deeper = tl.where(z >= ones(b2), 16, 0)
    bits = tl.sum(b1 + tl.where(escaped, b2 + deeper, 0), 0)
    n = tl.sum((escaped & (b1 == 0)).to(tl.int32), 0)
    sparse = tl.sum((inside & (b1 == 0)).to(tl.int32), 0)
    low, upper = elias_fano(n, fill)
    listed = tl.where((sparse > 0) & (bits + n > 0), length(fill) + upper + n * low, 0)
    tl.store(sizes + b, (bits + listed + 31) >> 5)


@jit(do_not_specialize=["spans", "blocks", "most"])
def exact_total_kernel(plan, counts, spans, blocks, most, SCAN: tl.constexpr):
    i = tl.arange(0, SCAN)
    moved = tl.zeros([SCAN], tl.int32)
    given = tl.zeros([SCAN], tl.int32)
    tables = spans * 32
    for first in range(0, tables, SCAN):
        inside = first + i < tables
        moved |= tl.load(counts + (first + i) * 32, mask=inside, other=0)
        given += (tl.load(plan + 1 + first + i, mask=inside, other=0) > 0).to(tl.int32)
    entries = tl.sum(given, 0)
    total = 1 + spans + (entries + 3) // 4 + (blocks + 1) // 2
    sizes = plan + 1 + tables
    for first in range(0, blocks, SCAN):
        inside = first + i < blocks
        size = tl.load(sizes + first + i, mask=inside, other=0)
        ends = tl.cumsum(size, 0)
        tl.store(sizes + first + i, total + ends - size, mask=inside)
        total += tl.sum(size, 0)
    total = tl.where(tl.max(moved, 0) > 0, tl.minimum(total, most), 1)
    tl.store(plan, total)


@on_device_of("new")
def measure_exact(new: Tensor, old: Tensor, plan: Tensor, *, layout: ExactLayout) -> None:
    """See :func:`tagc.ops.reference.measure_exact`."""
    new, old = new.view(torch.int16), old.view(torch.int16)
    spans, blocks, device = len(layout.spans), layout.blocks, new.device
    counts = buffer("exact_counts", (max(1, spans) * _BINS,), torch.int32, device, None)
    table, sizes = plan[:, 1:], plan[:, 1 + layout.tables :]
    where, mantissa = where_of(layout, device), MANTISSA[layout.dtype]
    torch_call(Tensor.zero_, counts)
    if blocks:
        exact_counts_kernel[(cdiv(blocks, _EACH),)](
            new, old, where, counts, blocks, EACH=_EACH, BLOCK=layout.block, MANTISSA=mantissa,
            BINS=_BINS, num_warps=min(4, warps_of(layout.block)),
        )  # fmt: skip
    if spans:
        exact_widths_kernel[(layout.tables,)](counts, table, num_warps=4)
    if blocks:
        exact_sizes_kernel[(blocks,)](
            new, old, where, table, sizes, blocks, BLOCK=layout.block, MANTISSA=mantissa,
            num_warps=warps_of(layout.block),
        )  # fmt: skip
    exact_total_kernel[(1,)](
        plan, counts, spans, blocks, layout.words, SCAN=_SCAN, num_warps=_SCAN_WARPS
    )


@jit(do_not_specialize=["spans", "most"])
def exact_head_kernel(plan, message, widths, spans, most, SPANS: tl.constexpr):
    total = tl.load(plan)
    tl.store(message, total)
    if (total > 1) & (total < most):
        c = tl.arange(0, 32)[None, :]
        entries = tl.full([], 0, tl.int32)
        widths += 4 * (1 + spans)
        for first in range(0, spans, SPANS):
            s = first + tl.arange(0, SPANS)
            inside = s[:, None] < spans
            entry = tl.load(plan + 1 + s[:, None] * 32 + c, mask=inside, other=0)
            given = (entry > 0).to(tl.int32)
            mask = tl.sum(given << c, 1)
            tl.store(message + 1 + s, mask, mask=s < spans)
            count = tl.sum(given, 1)
            place = entries + (tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(given, 1) - given
            tl.store(widths + place, entry.to(tl.int8), mask=given > 0)
            entries += tl.sum(count, 0)
        rest = entries + tl.arange(0, 4)
        tl.store(widths + rest, tl.zeros([4], tl.int8), mask=rest < (entries + 3) // 4 * 4)


@jit
def put_escaped(block, end, z, b2, which):
    """Levels 2 and 3 of some elements. Returns where they end."""
    width = tl.where(which, b2, 0)
    put(block, end + before(width), tl.minimum(z, ones(b2)), which)
    end += tl.sum(width, 0)
    deeper = which & (z >= ones(b2))
    width = tl.where(deeper, 16, 0)
    put(block, end + before(width), z, deeper)
    return end + tl.sum(width, 0)


@jit(do_not_specialize=["spans", "blocks", "numel", "most"])
def exact_encode_kernel(
    new, old, where, plan, message, halves, spans, blocks, numel, most,
    BLOCK: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    total = tl.load(plan)
    start, fill = tl.load(where + b), tl.load(where + blocks + b).to(tl.int32)
    j = tl.arange(0, BLOCK)
    inside = j < fill
    if total == most:
        x = tl.load(new + start + j, mask=inside, other=0)
        tl.store(halves + 2 + start + j, x, mask=inside)
        if start + fill == numel:
            tl.store(halves + 2 + numel, 0, mask=numel % 2 == 1)
    elif total > 1:
        span = tl.load(where + 2 * blocks + b)
        starts = plan + 1 + spans * 32
        first = tl.load(starts + b)
        after = tl.load(starts + b + 1, mask=b + 1 < blocks, other=0)
        words = tl.where(b + 1 < blocks, after, total) - first
        sizes = halves + 2 * (tl.load(starts) - (blocks + 1) // 2)
        tl.store(sizes + b, words.to(tl.int16))
        if b + 1 == blocks:
            tl.store(sizes + blocks, 0, mask=blocks % 2 == 1)
        if words > 0:
            block = message + first
            for word in range(0, words, BLOCK):
                tl.store(block + word + j, tl.zeros([BLOCK], tl.int32), mask=word + j < words)
            tl.debug_barrier()
            k = load_patterns(old + start, j, inside)
            z = change(load_patterns(new + start, j, inside), k)
            of_span = plan + 1 + span * 32
            entry = tl.load(of_span + ((k >> MANTISSA) & 31), mask=inside, other=0)
            b1, b2 = entry & 15, entry >> 4
            at = before(b1)
            end = tl.sum(b1, 0)
            width, more = tl.split(tl.reshape(b1, [BLOCK // 2, 2]))
            value, next_ = tl.split(tl.reshape(tl.minimum(z, ones(b1)), [BLOCK // 2, 2]))
            place, _ = tl.split(tl.reshape(at, [BLOCK // 2, 2]))
            put(block, place, value | (next_ << width), width + more > 0)
            escaped = inside & (z >= tl.maximum(ones(b1), 1))
            dense = escaped & (b1 > 0)
            if tl.sum(dense.to(tl.int32), 0) > 0:
                end = put_escaped(block, end, z, b2, dense)
            listed = escaped & (b1 == 0)
            n = tl.sum(listed.to(tl.int32), 0)
            if tl.sum((inside & (b1 == 0)).to(tl.int32), 0) > 0:
                put(block, end, n, n > 0)
                end += length(fill)
                if n > 0:
                    low, upper = elias_fano(n, fill)
                    rank = before(listed.to(tl.int32))
                    put(block, end + (j >> low) + rank, tl.full([BLOCK], 1, tl.int32), listed)
                    end += upper
                    put(block, end + rank * low, j & ones(low), listed)
                    end = put_escaped(block, end + n * low, z, b2, listed)


@on_device_of("new")
def encode_exact(
    new: Tensor, old: Tensor, plan: Tensor, message: Tensor, *, layout: ExactLayout
) -> None:
    """See :func:`tagc.ops.reference.encode_exact`."""
    spans = len(layout.spans)
    exact_head_kernel[(1,)](
        plan, message, message.view(torch.int8), spans, layout.words, SPANS=_SPANS, num_warps=4
    )
    if layout.blocks:
        exact_encode_kernel[(layout.blocks,)](
            new.view(torch.int16), old.view(torch.int16), where_of(layout, new.device), plan,
            message, message.view(torch.int16), spans, layout.blocks, layout.numel, layout.words,
            BLOCK=layout.block, MANTISSA=MANTISSA[layout.dtype], num_warps=warps_of(layout.block),
        )  # fmt: skip


@jit(do_not_specialize=["capacity", "spans", "blocks", "most", "stride"])
def exact_read_kernel(
    message, widths, halves, table, starts, capacity, spans, blocks, most, stride,
    SPANS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    message += r * stride
    halves += r * stride * 2
    table += r * spans * 32
    starts += r * (blocks + 1)
    total = tl.load(message)
    if (total > 1) & (total < most):
        c = tl.arange(0, 32)[None, :]
        entries = tl.full([], 0, tl.int32)
        widths += r * stride * 4
        for first in range(0, spans, SPANS):
            s = first + tl.arange(0, SPANS)
            mask = tl.load(message + 1 + s, mask=(s < spans) & (1 + s < capacity), other=0)
            given = (mask[:, None] >> c) & 1
            count = tl.sum(given, 1)
            place = entries + (tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(given, 1) - given
            place += 4 * (1 + spans)
            there = (given > 0) & (place // 4 < capacity)
            entry = tl.load(widths + place, mask=there, other=0).to(tl.int32) & 255
            tl.store(table + s[:, None] * 32 + c, entry, mask=s[:, None] < spans)
            entries += tl.sum(count, 0)
        sizes = 2 * (1 + spans + (entries + 3) // 4)
        start = sizes // 2 + (blocks + 1) // 2
        i = tl.arange(0, SCAN)
        for first in range(0, blocks, SCAN):
            b = first + i
            there = (b < blocks) & ((sizes + b) // 2 < capacity)
            size = tl.load(halves + sizes + b, mask=there, other=0).to(tl.int32) & 0xFFFF
            tl.store(starts + b, start + tl.cumsum(size, 0) - size, mask=b < blocks)
            start += tl.sum(size, 0)
        tl.store(starts + blocks, start)


@jit
def get_escaped(block, words, end, z, b2, which):
    """Levels 2 and 3 of some elements. Returns all numbers, and where these end."""
    width = tl.where(which, b2, 0)
    z = tl.where(which, get(block, words, end + before(width), width, which), z)
    end += tl.sum(width, 0)
    deeper = which & (z == ones(b2))
    width = tl.where(deeper, 16, 0)
    z = tl.where(deeper, get(block, words, end + before(width), width, deeper), z)
    return z, end + tl.sum(width, 0)


@jit(do_not_specialize=["capacity", "spans", "blocks", "most", "stride", "row_stride"])
def exact_decode_kernel(
    message, halves, rows, where, table, starts, capacity, spans, blocks, most, stride, row_stride,
    BLOCK: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    b, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    message += r * stride
    total = tl.load(message)
    start, fill = tl.load(where + b), tl.load(where + blocks + b).to(tl.int32)
    row = rows + r * row_stride + start
    j = tl.arange(0, BLOCK)
    inside = j < fill
    if total == most:
        there = inside & (1 + (start + j) // 2 < capacity)
        x = tl.load(halves + r * stride * 2 + 2 + start + j, mask=there, other=0)
        tl.store(row + j, x, mask=there)
    elif (total > 1) & (total < most):
        first = tl.load(starts + r * (blocks + 1) + b)
        size = tl.load(starts + r * (blocks + 1) + b + 1) - first
        # Sums of a damaged message's sizes may be anything.
        words = tl.where(first >= 0, tl.minimum(size, capacity - first), 0)
        if size > 0:
            block = message + first
            span = tl.load(where + 2 * blocks + b)
            of_span = table + (r * spans + span) * 32
            k = load_patterns(row, j, inside)
            entry = tl.load(of_span + ((k >> MANTISSA) & 31), mask=inside, other=0)
            b1, b2 = entry & 15, entry >> 4
            dense = b1 > 0
            z = get(block, words, before(b1), b1, dense)
            end = tl.sum(b1, 0)
            escaped = dense & (z == ones(b1))
            if tl.sum(escaped.to(tl.int32), 0) > 0:
                z, end = get_escaped(block, words, end, z, b2, escaped)
            tl.store(row + j, changed(k, z).to(tl.int16), mask=dense)
            if tl.sum((inside & (b1 == 0)).to(tl.int32), 0) > 0:
                n = tl.minimum(get(block, words, end, length(fill), fill > 0), fill)
                end += length(fill)
                if n > 0:
                    low, upper = elias_fano(n, fill)
                    number = tl.arange(0, 2 * BLOCK)
                    bit = get(block, words, end + number, 1, number < upper)
                    rank = before(bit)
                    end += upper
                    lower = get(block, words, end + rank * low, low, bit > 0)
                    place = ((number - rank) << low) | lower
                    listed = (bit > 0) & (rank < n) & (place < fill)
                    was = load_patterns(row, place, listed)
                    entries = tl.load(of_span + ((was >> MANTISSA) & 31), mask=listed, other=0)
                    q = tl.zeros([2 * BLOCK], tl.int32)
                    q, _ = get_escaped(block, words, end + n * low, q, entries >> 4, listed)
                    tl.debug_barrier()  # other threads have loaded these elements, too
                    tl.store(row + place, changed(was, q).to(tl.int16), mask=listed)


@on_device_of("rows")
def decode_exact(message: Tensor, rows: Tensor, *, layout: ExactLayout) -> None:
    """See :func:`tagc.ops.reference.decode_exact`."""
    if not layout.blocks or not len(rows):
        return
    (n, capacity), spans, device = message.shape, len(layout.spans), rows.device
    halves = message.view(torch.int16)
    table = buffer("exact_table", (n * layout.tables,), torch.int32, device, None)
    starts = buffer("exact_starts", (n * (layout.blocks + 1),), torch.int32, device, None)
    exact_read_kernel[(n,)](
        message, message.view(torch.int8), halves, table, starts, capacity, spans, layout.blocks,
        layout.words, message.stride(0), SPANS=_SPANS, SCAN=_SCAN, num_warps=_SCAN_WARPS,
    )  # fmt: skip
    exact_decode_kernel[(layout.blocks, n)](
        message, halves, rows.view(torch.int16), where_of(layout, device), table, starts, capacity,
        spans, layout.blocks, layout.words, message.stride(0), rows.stride(0),
        BLOCK=layout.block, MANTISSA=MANTISSA[layout.dtype], num_warps=warps_of(layout.block),
    )  # fmt: skip
