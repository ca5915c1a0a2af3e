"""Uncompressed pieces of messages, and stamps, one launch for all of a message.

A table on the device lists the pieces. The grid is tiles of the longest piece, rows, and pieces;
after the pieces comes one more, for what concerns the whole message: writing the stamps, or if they
differ, the flag and NaN in all columns. Every program compares the stamps, so none needs another's
result.

Columns and lengths are multiples of ``UNIT``, and so stand in the table in that unit: then Triton
knows that neighbouring elements are aligned and share a mask, and loads up to 16 bytes at once.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from tagc.ops.dense import DenseLayout

from .device import on_device_of
from .jit import jit, tl
from .scalar import widen
from .sizes import cdiv

_TILE, _WARPS = 2048, 4
# A message's elements and stamps are loaded for so many ranks at once.
_STEPS, _STAMPS = 8, 64
_LARGEST_UNIT = 16


@jit
def row_of_table(table, p, UNIT: tl.constexpr, OF_WORDS: tl.constexpr):
    """First column, length, and first element in a message, of the piece ``p``."""
    table += 3 * p
    return (
        tl.load(table) * UNIT,
        (tl.load(table + 1) * UNIT).to(tl.int32),
        tl.load(table + 2) * OF_WORDS,
    )


@jit
def to_bfloat16(x):
    """float32 rounded to nearest even; NaN has the bits 0x7fc0."""
    b = x.to(tl.uint32, bitcast=True)
    rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
    is_nan = (b & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit
def stamps_differ(words, stamp, R, words_next, STAMPS: tl.constexpr):
    """Whether any message's stamp differs."""
    mark, count = tl.load(stamp), tl.load(stamp + 1)
    lane = tl.arange(0, STAMPS)
    differs = tl.zeros([STAMPS], tl.int32)
    for first in range(0, R, STAMPS):
        inside = lane < R - first
        at = words + (first + lane).to(tl.int64) * words_next
        differs |= (tl.load(at, mask=inside, other=mark) != mark).to(tl.int32)
        differs |= (tl.load(at + 1, mask=inside, other=count) != count).to(tl.int32)
    return tl.max(differs, 0) != 0


@jit
def spoil(out, columns, TILE: tl.constexpr):
    """NaN in all columns, by the programs of one row."""
    for tile in range(tl.program_id(0), tl.cdiv(columns, TILE), tl.num_programs(0)):
        j = tile * TILE + tl.arange(0, TILE)
        x = tl.full([TILE], float("nan"), tl.float32).to(out.dtype.element_ty)
        tl.store(out + j, x, mask=j < columns)


@jit(do_not_specialize=["stamp", "table", "pieces", "rows"])
def put_dense_kernel(
    x, elements, words, stamp, table, pieces, rows, x_stride, elements_stride, words_stride,
    UNIT: tl.constexpr, OF_WORDS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
    STAMPS: tl.constexpr,
):  # fmt: skip
    p, d = tl.program_id(2), tl.program_id(1).to(tl.int64)
    if p < pieces:
        column, n, first = row_of_table(table, p, UNIT, OF_WORDS)
        j = tl.program_id(0) * TILE + tl.arange(0, TILE)
        some = tl.load(x + (d * x_stride + column) + j, mask=j < n, other=0.0)
        if x.dtype.element_ty != elements.dtype.element_ty:
            some = to_bfloat16(widen(some))
        end = n
        if HALF:
            end += n % 2
        tl.store(elements + (d * elements_stride + first) + j, some, mask=j < end)
    if stamp is not None and (p == pieces) & (tl.program_id(0) == 0) & (d == 0):
        mark, count = tl.load(stamp), tl.load(stamp + 1) + 1
        lane = tl.arange(0, STAMPS)
        for begin in range(0, rows, STAMPS):
            at = words + (begin + lane).to(tl.int64) * words_stride
            inside = lane < rows - begin
            tl.store(at, tl.zeros_like(lane) + mark, mask=inside)
            tl.store(at + 1, tl.zeros_like(lane) + count, mask=inside)
        tl.debug_barrier()  # all threads have read the count
        tl.store(stamp + 1, count)


@jit(do_not_specialize=["stamp", "wrong", "table", "pieces", "R", "columns", "divisor"])
def sum_dense_kernel(
    elements, words, out, stamp, wrong, table, pieces, R, columns, divisor, elements_stride,
    elements_next, words_next, out_stride,
    UNIT: tl.constexpr, OF_WORDS: tl.constexpr, DIVIDE: tl.constexpr, TILE: tl.constexpr,
    STEPS: tl.constexpr, STAMPS: tl.constexpr,
):  # fmt: skip
    p, k = tl.program_id(2), tl.program_id(1).to(tl.int64)
    out += k * out_stride
    if stamp is not None:
        differ = stamps_differ(words, stamp, R, words_next, STAMPS)
        if differ & (p == pieces):
            spoil(out, columns, TILE)
            if tl.program_id(0) == 0:
                tl.store(wrong, 1)
    if p < pieces:
        column, n, first = row_of_table(table, p, UNIT, OF_WORDS)
        j = tl.program_id(0) * TILE + tl.arange(0, TILE)
        inside = j < n
        elements += k * elements_stride + first
        total = wide(tl.load(elements + j, mask=inside, other=0.0))
        for begin in range(1, R, STEPS):
            some = ()
            rank = tl.zeros_like(j) + begin
            for i in tl.static_range(STEPS):
                elements += elements_next
                some += (tl.load(elements + j, mask=inside & (rank + i < R), other=0.0),)
            for i in tl.static_range(STEPS):
                # Adding a zero would lose a minus zero.
                total = tl.where(rank + i < R, total + wide(some[i]), total)
        if DIVIDE:
            total = divided(total, divisor)
        else:
            total *= divisor
        if stamp is not None:
            total = tl.where(differ, float("nan"), total)
        tl.store(out + column + j, total.to(out.dtype.element_ty), mask=inside)


@jit
def wide(x):
    """float32, or float64 as it is."""
    if x.dtype == tl.float64:
        return x
    else:
        return widen(x)


@jit
def divided(x, divisor):
    """``x / divisor``, rounded once."""
    if x.dtype == tl.float64:
        return x / (tl.zeros_like(x) + divisor)
    else:
        return tl.div_rn(x, tl.zeros_like(x) + divisor)


@jit(do_not_specialize=["wrong", "table", "pieces", "columns"])
def get_dense_kernel(
    elements, out, wrong, table, pieces, columns, elements_stride, out_stride,
    UNIT: tl.constexpr, OF_WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    p, k = tl.program_id(2), tl.program_id(1).to(tl.int64)
    out += k * out_stride
    if wrong is not None:
        is_wrong = tl.load(wrong) != 0
        if is_wrong & (p == pieces):
            spoil(out, columns, TILE)
    if p < pieces:
        column, n, first = row_of_table(table, p, UNIT, OF_WORDS)
        j = tl.program_id(0) * TILE + tl.arange(0, TILE)
        x = tl.load(elements + (k * elements_stride + first) + j, mask=j < n, other=0.0)
        if x.dtype != out.dtype.element_ty:
            x = widen(x)
            if out.dtype.element_ty == tl.float16:
                b = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
                near = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
                x = tl.where(b < 0x7F800000, near, x)
            x = x.to(out.dtype.element_ty)
        if wrong is not None:
            x = tl.where(is_wrong, float("nan"), x).to(out.dtype.element_ty)
        tl.store(out + column + j, x, mask=j < n)


@on_device_of("message")
def put_dense(x: Tensor, message: Tensor, stamp: Tensor | None, *, layout: DenseLayout) -> None:
    """See :meth:`tagc.ops.dense.DenseOps.put_dense`."""
    elements, unit = message.view(layout.wire), _unit(layout)
    half = any(piece.numel * layout.wire.itemsize % 4 for piece in layout.pieces)
    put_dense_kernel[_grid(layout, len(message), stamp is not None)](
        x, elements, message[:, layout.tail :], stamp, _table(layout, unit, message.device),
        len(layout.pieces), len(message), x.stride(0), elements.stride(0), message.stride(0),
        UNIT=unit, OF_WORDS=16 // layout.wire.itemsize, HALF=half, TILE=_TILE, STAMPS=_STAMPS,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@on_device_of("message")
def sum_dense(
    message: Tensor,
    out: Tensor,
    stamp: Tensor | None,
    wrong: Tensor | None,
    *,
    layout: DenseLayout,
    divisor: int,
) -> None:
    """See :meth:`tagc.ops.dense.DenseOps.sum_dense`."""
    elements, unit = message.view(layout.wire), _unit(layout)
    divide = divisor & (divisor - 1) != 0
    sum_dense_kernel[_grid(layout, len(message), stamp is not None)](
        elements, message[..., layout.tail :], out, stamp, _bytes_of(wrong),
        _table(layout, unit, message.device), len(layout.pieces), message.shape[1], out.shape[1],
        float(divisor) if divide else 1.0 / divisor, elements.stride(0), elements.stride(1),
        message.stride(1), out.stride(0),
        UNIT=unit, OF_WORDS=16 // layout.wire.itemsize, DIVIDE=divide, TILE=_TILE, STEPS=_STEPS,
        STAMPS=_STAMPS, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@on_device_of("message")
def get_dense(message: Tensor, out: Tensor, wrong: Tensor | None, *, layout: DenseLayout) -> None:
    """See :meth:`tagc.ops.dense.DenseOps.get_dense`."""
    elements, unit = message.view(layout.wire), _unit(layout)
    get_dense_kernel[_grid(layout, len(message), wrong is not None)](
        elements, out, _bytes_of(wrong), _table(layout, unit, message.device), len(layout.pieces),
        out.shape[1], elements.stride(0), out.stride(0),
        UNIT=unit, OF_WORDS=16 // layout.wire.itemsize, TILE=_TILE, num_warps=_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def _bytes_of(flag: Tensor | None) -> Tensor | None:
    return None if flag is None else flag.view(torch.int8)


def _grid(layout: DenseLayout, rows: int, more: bool) -> tuple[int, int, int]:
    longest = max((piece.numel for piece in layout.pieces), default=1)
    return max(1, cdiv(longest, _TILE)), rows, len(layout.pieces) + more


def _unit(layout: DenseLayout) -> int:
    numbers = (n for piece in layout.pieces for n in (piece.column, piece.numel))
    return math.gcd(_LARGEST_UNIT, *numbers)


@cache
def _table(layout: DenseLayout, unit: int, device: torch.device) -> Tensor:
    rows = [(p.column // unit, p.numel // unit, p.word // 4) for p in layout.pieces]
    # Training cannot use a tensor that an evaluation made in inference mode.
    with torch.inference_mode(False):
        return torch.tensor(rows or [(0, 0, 0)], dtype=torch.int64, device=device)
