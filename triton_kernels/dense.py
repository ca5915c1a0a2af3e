"""Uncompressed pieces of messages, and stamps, one launch for all of a message.

A table on the device lists the pieces. Of a row's programs, the first ones are tiles of the longest
piece, for each piece; as many more are for what concerns the whole message: writing the stamps, or
if they differ, the flag and NaN in all columns. Every program compares the stamps, so none needs
another's result. Launches of blocks have these programs after their own.

Columns and lengths are multiples of ``UNIT``, and so stand in the table in that unit: then Triton
knows that neighbouring elements are aligned and share a mask, and loads up to 16 bytes at once.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tagc.ops.dense import DenseLayout

from .fingerprint import fingerprint_part
from .jit import cdiv, division, jit, on_device_of, tl
from .scalar import widen

_WARPS = 4
# Elements of a warp.
_EACH = 512
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
def is_spoilt(stamps, stamp, wrong, R, stamps_next, STAMPS: tl.constexpr):
    """Whether rows become NaN: if any stamp differs, or without stamps, if the flag is set."""
    if stamp is not None:
        mark, count = tl.load(stamp), tl.load(stamp + 1)
        lane = tl.arange(0, STAMPS)
        differs = tl.zeros([STAMPS], tl.int32)
        for first in range(0, R, STAMPS):
            inside = lane < R - first
            at = stamps + (first + lane).to(tl.int64) * stamps_next
            differs |= (tl.load(at, mask=inside, other=mark) != mark).to(tl.int32)
            differs |= (tl.load(at + 1, mask=inside, other=count) != count).to(tl.int32)
        return tl.max(differs, 0) != 0
    else:
        return tl.load(wrong) != 0


@jit
def spoil(out, columns, first, step, TILE: tl.constexpr):
    """NaN in every ``step``-th tile of columns."""
    for tile in range(first, tl.cdiv(columns, TILE), step):
        j = tile * TILE + tl.arange(0, TILE)
        x = tl.full([TILE], float("nan"), tl.float32).to(out.dtype.element_ty)
        tl.store(out + j, x, mask=j < columns)


@jit
def put_part(
    part, d, rows, elements, stamps, stamp, table, pieces, tiles, messages, rows_stride,
    elements_stride, stamps_stride,
    UNIT: tl.constexpr, OF_WORDS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
    STAMPS: tl.constexpr,
):  # fmt: skip
    """What the program ``part`` of row ``d`` puts."""
    p, tile = part // tiles, part % tiles
    if p < pieces:
        column, n, first = row_of_table(table, p, UNIT, OF_WORDS)
        j = tile * TILE + tl.arange(0, TILE)
        some = tl.load(rows + (d * rows_stride + column) + j, mask=j < n, other=0.0)
        if rows.dtype.element_ty != elements.dtype.element_ty:
            some = to_bfloat16(widen(some))
        end = n
        if HALF:
            end += n % 2
        tl.store(elements + (d * elements_stride + first) + j, some, mask=j < end)
    if stamp is not None and (p == pieces) & (tile == 0) & (d == 0):
        mark, count = tl.load(stamp), tl.load(stamp + 1) + 1
        lane = tl.arange(0, STAMPS)
        for begin in range(0, messages, STAMPS):
            at = stamps + (begin + lane).to(tl.int64) * stamps_stride
            inside = lane < messages - begin
            tl.store(at, tl.zeros_like(lane) + mark, mask=inside)
            tl.store(at + 1, tl.zeros_like(lane) + count, mask=inside)
        tl.debug_barrier()  # all threads have read the count
        tl.store(stamp + 1, count)


@jit
def put_or_note(
    part, d, rows, elements, stamps, stamp, table, pieces, tiles, messages, rows_stride,
    elements_stride, stamps_stride, puts, bits, sums, before, words, rest, parts,
    UNIT: tl.constexpr, OF_WORDS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
    STAMPS: tl.constexpr, SUMMED: tl.constexpr, OF_WORD: tl.constexpr,
):  # fmt: skip
    """What the program ``part`` of row ``d`` puts, or after these, what it adds to the rows'
    fingerprint."""
    if part < puts:
        put_part(
            part, d, rows, elements, stamps, stamp, table, pieces, tiles, messages, rows_stride,
            elements_stride, stamps_stride, UNIT, OF_WORDS, HALF, TILE, STAMPS,
        )  # fmt: skip
    elif sums is not None:
        fingerprint_part(part - puts, bits, sums, before, None, words, rest, parts, SUMMED, OF_WORD)


@jit
def sum_part(
    part, k, spoilt, rows, elements, stamp, wrong, table, pieces, tiles, columns, R, divisor,
    rows_stride, elements_stride, elements_next,
    UNIT: tl.constexpr, OF_WORDS: tl.constexpr, ONE: tl.constexpr, DIVIDE: tl.constexpr,
    TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """What the program ``part`` of row ``k`` sums.

    Args:
        spoilt: what :func:`is_spoilt` returned; None without a flag.
    """
    p, tile = part // tiles, part % tiles
    rows += k * rows_stride
    if spoilt is not None:
        spoils = spoilt & (p == pieces)
        if spoils:
            spoil(rows, columns, tile, tiles, TILE)
            if stamp is not None and tile == 0:
                tl.store(wrong, 1)
    if p < pieces:
        column, n, first = row_of_table(table, p, UNIT, OF_WORDS)
        j = tile * TILE + tl.arange(0, TILE)
        inside = j < n
        elements += k * elements_stride + first
        total = tl.load(elements + j, mask=inside, other=0.0)
        if ONE:
            total = as_it_is(total, rows.dtype.element_ty)
        else:
            total = wide(total)
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
        if spoilt is not None:
            total = tl.where(spoilt, float("nan"), total)
        tl.store(rows + column + j, total.to(rows.dtype.element_ty), mask=inside)


@jit
def as_it_is(x, dtype: tl.constexpr):
    """Elements of a message in the dtype of rows; finite ones stay finite."""
    if x.dtype != dtype:
        x = widen(x)
        if dtype == tl.float16:
            b = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            near = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
            x = tl.where(b < 0x7F800000, near, x)
    return x


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


@jit(do_not_specialize=["stamp", "table", "pieces", "tiles", "messages"])
def put_dense_kernel(
    rows, elements, stamps, stamp, table, pieces, tiles, messages, rows_stride, elements_stride,
    stamps_stride,
    UNIT: tl.constexpr, OF_WORDS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
    STAMPS: tl.constexpr,
):  # fmt: skip
    put_part(
        tl.program_id(0), tl.program_id(1).to(tl.int64), rows, elements, stamps, stamp, table,
        pieces, tiles, messages, rows_stride, elements_stride, stamps_stride, UNIT, OF_WORDS, HALF,
        TILE, STAMPS,
    )  # fmt: skip


@jit(do_not_specialize=["stamp", "wrong", "table", "pieces", "tiles", "R", "columns", "divisor"])
def sum_dense_kernel(
    R, divisor, rows, elements, stamps, stamp, wrong, table, pieces, tiles, columns,
    rows_stride, elements_stride, elements_next, stamps_next,
    DIVIDE: tl.constexpr, UNIT: tl.constexpr, OF_WORDS: tl.constexpr, ONE: tl.constexpr,
    TILE: tl.constexpr, STEPS: tl.constexpr, STAMPS: tl.constexpr,
):  # fmt: skip
    spoilt = None
    if wrong is not None:
        spoilt = is_spoilt(stamps, stamp, wrong, R, stamps_next, STAMPS)
    sum_part(
        tl.program_id(0), tl.program_id(1).to(tl.int64), spoilt, rows, elements, stamp, wrong,
        table, pieces, tiles, columns, R, divisor, rows_stride, elements_stride, elements_next,
        UNIT, OF_WORDS, ONE, DIVIDE, TILE, STEPS,
    )  # fmt: skip


@on_device_of("message")
def put_dense(x: Tensor, message: Tensor, stamp: Tensor | None, *, layout: DenseLayout) -> None:
    """See :func:`tagc.ops.reference.put_dense`."""
    programs, arguments = put_arguments(x, message, stamp, layout, _WARPS)
    put_dense_kernel[(programs, len(message))](**arguments, num_warps=_WARPS)


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
    """See :func:`tagc.ops.reference.sum_dense`."""
    programs, arguments = sum_arguments(message, out, stamp, wrong, layout, divisor, _WARPS)
    factor, divide = division(divisor)
    sum_dense_kernel[(programs, len(message))](
        message.shape[1], factor, **arguments, DIVIDE=divide, num_warps=_WARPS,
    )  # fmt: skip


def put_arguments(
    x: Tensor, message: Tensor, stamp: Tensor | None, layout: DenseLayout, warps: int
) -> tuple[int, dict[str, Any]]:
    """Programs for each row, and arguments of kernels that call :func:`put_part`."""
    programs, arguments = _arguments(layout, message, x, stamp, warps, stamp is not None)
    half = any(piece.numel * layout.wire.itemsize % 4 for piece in layout.pieces)
    return programs, arguments | {
        "messages": len(message), "stamps_stride": message.stride(0), "HALF": half,
    }  # fmt: skip


def sum_arguments(
    message: Tensor,
    rows: Tensor,
    stamp: Tensor | None,
    wrong: Tensor | None,
    layout: DenseLayout,
    divisor: int,
    warps: int,
) -> tuple[int, dict[str, Any]]:
    """Programs for each row, and arguments of kernels that call :func:`sum_part`."""
    programs, arguments = _arguments(layout, message, rows, stamp, warps, wrong is not None)
    return programs, arguments | {
        "wrong": None if wrong is None else wrong.view(torch.int8), "columns": rows.shape[1],
        "elements_next": arguments["elements"].stride(1), "stamps_next": message.stride(1),
        "ONE": message.shape[1] == 1 and divisor == 1, "STEPS": _STEPS,
    }  # fmt: skip


def _arguments(
    layout: DenseLayout,
    message: Tensor,
    rows: Tensor,
    stamp: Tensor | None,
    warps: int,
    more: bool,
) -> tuple[int, dict[str, Any]]:
    tile, pieces, elements = _EACH * warps, len(layout.pieces), message.view(layout.wire)
    unit = math.gcd(_LARGEST_UNIT, *(n for p in layout.pieces for n in (p.column, p.numel)))
    tiles = cdiv(max((piece.numel for piece in layout.pieces), default=1), tile)
    return tiles * (pieces + more), {
        "rows": rows, "elements": elements, "stamps": message[..., layout.tail :], "stamp": stamp,
        "table": _table(layout, unit, message.device), "pieces": pieces, "tiles": tiles,
        "rows_stride": rows.stride(0), "elements_stride": elements.stride(0), "UNIT": unit,
        "OF_WORDS": 16 // layout.wire.itemsize, "TILE": tile, "STAMPS": _STAMPS,
    }  # fmt: skip


@cache
def _table(layout: DenseLayout, unit: int, device: torch.device) -> Tensor:
    rows = [(p.column // unit, p.numel // unit, p.word // 4) for p in layout.pieces]
    # Training cannot use a tensor that an evaluation made in inference mode.
    with torch.inference_mode(False):
        return torch.tensor(rows or [(0, 0, 0)], dtype=torch.int64, device=device)
