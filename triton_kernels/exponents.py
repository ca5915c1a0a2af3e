"""Packed exponents: a program packs or unpacks a chunk of a row.

Packing takes three launches: heads and the zeros at a message's end; chunks, which mark the head if
their exceptions do not fit; and rows that travel as they are, over what was packed of them.

A block is two halves, whose codes share bytes, so nothing moves between threads but sums. Only a
chunk with exceptions ranks its elements.

Worked example: see :mod:`tagc.ops.exponents`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.exponents import ABOVE_MEAN, BLOCK, CHUNK, EXCEPTION, HEAD, ZERO, ExponentLayout

from .jit import cdiv, constant, jit, on_device_of, tl

# 16 elements a thread.
_WARPS = 8
_CHUNK, _BLOCK, _HALF = constant(CHUNK), constant(BLOCK), constant(BLOCK // 2)
_ZERO, _EXCEPTION, _ABOVE_MEAN = constant(ZERO), constant(EXCEPTION), constant(ABOVE_MEAN)
_HEAD = constant(4 * HEAD)


@jit
def element_bits(x, i, numel):
    """Bit patterns of elements, from 0 on, int32; zeros past the end."""
    return tl.load(x + i, mask=i < numel, other=0).to(tl.int32) & 0xFFFF


@jit
def is_exception(e, top):
    """Whether exponents have no code of their own, as numbers."""
    return ((e > 0) & ((e > top) | (e <= top - _ZERO))).to(tl.int32)


@jit
def code_of(e, top):
    """Codes of exponents."""
    outside = is_exception(e, top) > 0
    return tl.where(e == 0, _ZERO, tl.where(outside, _EXCEPTION, top - e))


@jit
def ranks(first, second):
    """The number of marked elements of a chunk before each, by halves of blocks; and of all."""
    count = tl.sum(first, 1)
    both = count + tl.sum(second, 1)
    before = tl.cumsum(both, 0) - both
    rank = before[:, None] + tl.cumsum(first, 1) - first
    rank_of_second = (before + count)[:, None] + tl.cumsum(second, 1) - second
    return rank, rank_of_second, tl.sum(both, 0)


@jit
def exponents_head_kernel(message, stride, words):
    """Zeros before and after what chunks write."""
    message += tl.program_id(0).to(tl.int64) * stride
    i = tl.arange(0, 4)
    tl.store(message + words - 4 + i, tl.zeros([4], tl.int32))
    tl.store(message + i, tl.zeros([4], tl.int32))


@jit
def pack_exponents_kernel(x, message, sent, numel, blocks, x_stride, stride):
    chunk, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x += r * x_stride
    message += r * stride
    sent += r * stride * 4 + _HEAD
    b = chunk * _CHUNK + tl.arange(0, _CHUNK)
    k = tl.arange(0, _HALF)[None, :]
    there = (b < blocks)[:, None]
    at = b.to(tl.int64)[:, None] * _BLOCK + k
    first, second = element_bits(x, at, numel), element_bits(x, at + _HALF, numel)
    tl.store(sent + at, ((first >> 8 & 0x80) | (first & 0x7F)).to(tl.int8), mask=there)
    tl.store(sent + at + _HALF, ((second >> 8 & 0x80) | (second & 0x7F)).to(tl.int8), mask=there)
    first, second = first >> 7 & 255, second >> 7 & 255
    high = tl.maximum(tl.max(first, 1), tl.max(second, 1))
    count = tl.sum((first > 0).to(tl.int32), 1) + tl.sum((second > 0).to(tl.int32), 1)
    total = tl.sum(first, 1) + tl.sum(second, 1)
    other = total // tl.maximum(count, 1) + _ABOVE_MEAN
    of_high = tl.sum(is_exception(first, high[:, None]) + is_exception(second, high[:, None]), 1)
    of_other = tl.sum(is_exception(first, other[:, None]) + is_exception(second, other[:, None]), 1)
    top = tl.where(of_other < of_high, other, high)
    codes = sent + tl.cast(blocks, tl.int64) * _BLOCK
    both = code_of(first, top[:, None]) | (code_of(second, top[:, None]) << 4)
    tl.store(codes + b.to(tl.int64)[:, None] * _HALF + k, both.to(tl.int8), mask=there)
    tops = codes + tl.cast(blocks, tl.int64) * _HALF
    tl.store(tops + b, top.to(tl.int8), mask=b < blocks)
    found = tl.sum(tl.minimum(of_high, of_other), 0)
    spare = tops + blocks
    tl.store(
        spare + b, tl.zeros([_CHUNK], tl.int8), mask=(b < blocks) & (b - chunk * _CHUNK >= found)
    )
    if found > 0:
        room = tl.minimum(blocks - chunk * _CHUNK, _CHUNK)
        marked, of_second = is_exception(first, top[:, None]), is_exception(second, top[:, None])
        rank, rank_of_second, _ = ranks(marked, of_second)
        spare += chunk * _CHUNK
        tl.store(spare + rank, first.to(tl.int8), mask=(marked > 0) & (rank < room))
        fits = (of_second > 0) & (rank_of_second < room)
        tl.store(spare + rank_of_second, second.to(tl.int8), mask=fits)
        if found > room:
            tl.atomic_max(message, 1, sem="relaxed")


@jit
def raw_exponents_kernel(x, message, elements, numel, room, x_stride, stride, TILE: tl.constexpr):
    """The rows that are marked, as they are."""
    r = tl.program_id(1).to(tl.int64)
    if tl.load(message + r * stride) == 1:
        i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        some = tl.load(x + r * x_stride + i, mask=i < numel, other=0)
        sent = elements + r * stride * 2 + _HEAD // 2
        tl.store(sent + i, some, mask=i < room)


@on_device_of("rows")
def pack_exponents(rows: Tensor, message: Tensor, *, layout: ExponentLayout) -> None:
    """See :func:`tagc.ops.reference.pack_exponents`."""
    n, x, stride = len(rows), rows.view(torch.int16), message.stride(0)
    if not n:
        return
    exponents_head_kernel[(n,)](message, stride, layout.words, num_warps=1)
    if layout.blocks:
        pack_exponents_kernel[(cdiv(layout.blocks, CHUNK), n)](
            x, message, message.view(torch.int8), layout.numel, layout.blocks, x.stride(0), stride,
            num_warps=_WARPS,
        )  # fmt: skip
        room = 2 * (layout.raw_words - HEAD)
        raw_exponents_kernel[(cdiv(room, CHUNK * BLOCK), n)](
            x, message, message.view(torch.int16), layout.numel, room, x.stride(0), stride,
            TILE=CHUNK * BLOCK, num_warps=_WARPS,
        )  # fmt: skip


@jit
def unpack_exponents_kernel(
    message, sent, elements, x, numel, blocks, width, raw_words, stride, x_stride
):
    chunk, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x += r * x_stride
    b = chunk * _CHUNK + tl.arange(0, _CHUNK)
    k = tl.arange(0, _HALF)[None, :]
    at = b.to(tl.int64)[:, None] * _BLOCK + k
    if (tl.load(message + r * stride) == 1) & (width >= raw_words):
        elements += r * stride * 2 + _HEAD // 2
        tl.store(x + at, tl.load(elements + at, mask=at < numel, other=0), mask=at < numel)
        at += _HALF
        tl.store(x + at, tl.load(elements + at, mask=at < numel, other=0), mask=at < numel)
    else:
        sent += r * stride * 4 + _HEAD
        there = (b < blocks)[:, None]
        low = tl.load(sent + at, mask=there, other=0).to(tl.int32)
        low_of_second = tl.load(sent + at + _HALF, mask=there, other=0).to(tl.int32)
        codes = sent + tl.cast(blocks, tl.int64) * _BLOCK
        both = tl.load(codes + b.to(tl.int64)[:, None] * _HALF + k, mask=there, other=0)
        both = both.to(tl.int32)
        first, second = both & 15, both >> 4 & 15
        tops = codes + tl.cast(blocks, tl.int64) * _HALF
        top = tl.load(tops + b, mask=b < blocks, other=0).to(tl.int32)[:, None]
        marked, of_second = (first == _EXCEPTION).to(tl.int32), (second == _EXCEPTION).to(tl.int32)
        e = tl.where(first == _ZERO, 0, (top - first) & 255)
        e_of_second = tl.where(second == _ZERO, 0, (top - second) & 255)
        if tl.sum(tl.sum(marked + of_second, 1), 0) > 0:
            spare = tops + blocks + chunk * _CHUNK
            room = tl.minimum(blocks - chunk * _CHUNK, _CHUNK)
            rank, rank_of_second, _ = ranks(marked, of_second)
            own = tl.load(spare + rank, mask=(marked > 0) & (rank < room), other=0).to(tl.int32)
            e = tl.where(marked > 0, own & 255, e)
            fits = (of_second > 0) & (rank_of_second < room)
            own = tl.load(spare + rank_of_second, mask=fits, other=0).to(tl.int32)
            e_of_second = tl.where(of_second > 0, own & 255, e_of_second)
        bits = ((low & 0x80) << 8) | (e << 7) | (low & 0x7F)
        tl.store(x + at, bits.to(tl.int16), mask=at < numel)
        bits = ((low_of_second & 0x80) << 8) | (e_of_second << 7) | (low_of_second & 0x7F)
        tl.store(x + at + _HALF, bits.to(tl.int16), mask=at + _HALF < numel)


@on_device_of("rows")
def unpack_exponents(message: Tensor, rows: Tensor, *, layout: ExponentLayout) -> None:
    """See :func:`tagc.ops.reference.unpack_exponents`."""
    if not layout.blocks or not len(rows):
        return
    x = rows.view(torch.int16)
    unpack_exponents_kernel[(cdiv(layout.blocks, CHUNK), len(rows))](
        message, message.view(torch.int8), message.view(torch.int16), x, layout.numel,
        layout.blocks, message.shape[1], layout.raw_words, message.stride(0), x.stride(0),
        num_warps=_WARPS,
    )  # fmt: skip
