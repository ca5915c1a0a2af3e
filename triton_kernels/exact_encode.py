"""Write a message of exact changes.

A first launch writes the head: total, masks and widths. In a second one, each program writes a
block: it clears the block's words, which are its own, and then sets bits, in no fixed order. Two
neighbours of level 1 have at most 30 bits, and are set together.

Worked example: see :mod:`tagc.ops.exact`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.exact import MANTISSA, ExactLayout

from .exact_code import (
    before,
    change,
    elias_fano,
    length,
    load_patterns,
    ones,
    put,
    warps_of,
    where_of,
)
from .jit import jit, on_device_of, tl

_SPANS = 16


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
    """See :meth:`tagc.ops.exact.ExactOps.encode_exact`."""
    spans = len(layout.spans)
    exact_head_kernel[(1,)](
        plan,
        message,
        message.view(torch.int8),
        spans,
        layout.words,
        SPANS=_SPANS,
        num_warps=4,
    )
    if layout.blocks:
        exact_encode_kernel[(layout.blocks,)](
            new.view(torch.int16), old.view(torch.int16), where_of(layout, new.device), plan,
            message, message.view(torch.int16), spans, layout.blocks, layout.numel, layout.words,
            BLOCK=layout.block, MANTISSA=MANTISSA[layout.dtype], num_warps=warps_of(layout.block),
        )  # fmt: skip
