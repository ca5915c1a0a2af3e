"""Turn old rows into new ones, by messages of exact changes.

A first launch has a program for each message, which reads the tables of widths and finds where
blocks begin. In a second one, each program decodes a block of a message. It reads the numbers of
all elements, and then those of the elements in the block's list.

Worked example: see :mod:`tagc.ops.exact`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.exact import MANTISSA, ExactLayout

from .exact_code import (
    before,
    changed,
    elias_fano,
    get,
    length,
    load_patterns,
    ones,
    warps_of,
    where_of,
)
from .jit import jit, on_device_of, tl
from .scratch import buffer

_SPANS, _SCAN, _SCAN_WARPS = 16, 4096, 8


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
    """See :meth:`tagc.ops.exact.ExactOps.decode_exact`."""
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
