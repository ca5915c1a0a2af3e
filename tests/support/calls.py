"""Calls of operators: all formats and dtypes, which a policy may have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tagc.ops.blocks import BITS, MAX_BLOCK, MIN_BLOCK, BlockLayout
from tagc.ops.dense import DenseLayout, Piece
from tagc.ops.exact import ExactLayout
from tagc.ops.exponents import ExponentLayout
from tagc.ops.matrix import BITS as MATRIX_BITS
from tagc.ops.matrix import AnyMatrices, Matrices, MatrixLayout
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import SYMBOLS
from tagc.selfcheck import Call, sketch_calls
from tagc.selfcheck.calls import exponent_calls

_I32, _F32 = torch.int32, torch.float32
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
_RESIDUALS = (torch.float32, torch.bfloat16, None)
# Of gradient and residual.
Dtypes = tuple[torch.dtype, torch.dtype | None]
_DTYPES: list[Dtypes] = list(itertools.product(_GRADIENTS, _RESIDUALS))


def every_call() -> Iterator[Call]:
    """Calls that together cover every format and every pair of dtypes of each operator."""
    dtypes = itertools.cycle(_DTYPES)
    averages, divisors = itertools.cycle((0.0, 0.9)), itertools.cycle((2, 3, 8, 6))
    for bits, block in itertools.product(BITS, (MIN_BLOCK, 256, MAX_BLOCK)):
        layout = BlockLayout(numel=4 * block + 16 * (bits + 1), bits=bits, block=block)
        chosen = next(dtypes), next(averages), next(divisors)
        yield from block_calls(layout, *chosen)
        yield dithered_call(layout, chosen[0][0])
    counts = itertools.cycle((1, 2, 2, 1))
    for bits, columns in itertools.product(MATRIX_BITS, (72, 5000)):
        layout = MatrixLayout(rows=11, columns=columns, bits=bits, count=next(counts))
        chosen = next(dtypes), next(averages), next(divisors)
        yield from matrix_calls(layout, *chosen)
        others = replace(layout, rows=5, columns=columns + 13), replace(layout, rows=30)
        yield from matrix_calls(Matrices((layout, *others)), *chosen)
    for dtype, block in itertools.product((torch.bfloat16, torch.float16), (32, 1024, 2048)):
        yield from exact_calls(ExactLayout(spans=(block + 1, 100), dtype=dtype, block=block))
    for numel in (8192, 4100):
        yield from exponent_calls(ExponentLayout(numel=numel))
    for dtype in _GRADIENTS:
        for rest in (0, 3):
            yield lag_call(dtype, rest)
        yield from fingerprint_calls(dtype)
        for wire in dict.fromkeys((dtype, torch.bfloat16)):
            for pieces in (
                (Piece(0, 4096, 0), Piece(4112, 48, 2048)),
                (Piece(1, 4097, 0), Piece(5001, 3, 4100)),
            ):
                layout = DenseLayout(wire, pieces, tail=4104)
                for stamped in (True, False):
                    yield from dense_calls(layout, dtype, next(divisors), stamped=stamped)
                    chosen = (dtype, next(dtypes)[1]), next(averages), next(divisors)
                    blocks = BlockLayout(numel=1000, bits=8 if stamped else 4)
                    yield from merged_calls(blocks, layout, *chosen, stamped=stamped)
                    matrix = MatrixLayout(rows=5, columns=72, bits=2 if stamped else 1)
                    yield from merged_calls(matrix, layout, *chosen, stamped=stamped)
    for shape in ((1, 1), (2, 8)):
        yield steer_call(*shape)
    # Tables with 6, 5, 4 and 3 hashes; large tables, which kernels may pack, with 3 and 4.
    keys = itertools.cycle((100, 900, 5000, 1 << 22, 1 << 22, 1 << 19))
    for symbol in [*SYMBOLS.values()] * 2:
        some = next(keys)
        layout = plan_layout(symbol.lanes * some * 20 + 3, symbol, some)
        yield from encoder_calls(layout, next(dtypes), next(divisors))
        yield from sketch_calls(layout)


def block_calls(
    layout: BlockLayout, dtypes: Dtypes, average: float, divisor: int, ranks: int = 8
) -> Iterator[Call]:
    return _elementwise("quantize", layout, dtypes, average, divisor, ranks, dither=None)


def matrix_calls(
    layout: AnyMatrices, dtypes: Dtypes, average: float, divisor: int, ranks: int = 8
) -> Iterator[Call]:
    return _elementwise("quantize_matrix", layout, dtypes, average, divisor, ranks)


def _elementwise(operator, layout, dtypes, average, divisor, ranks, **dither) -> Iterator[Call]:
    gradient, residual = dtypes
    given = {"grad": gradient, "residual": residual, "message": _I32, **dither}
    yield Call.of(operator, ranks, **given, layout=layout, average=average)
    given = {"message": _I32, "out": gradient}
    yield Call.of(f"de{operator}", 1, ranks, **given, layout=layout, divisor=divisor, add=False)


def dithered_call(layout: BlockLayout, gradient: torch.dtype) -> Call:
    """The call that rounds stochastically."""
    given = {"grad": gradient, "residual": None, "message": _I32, "dither": _I32}
    return Call.of("quantize", 2, **given, layout=layout, average=0.0)


def exact_calls(layout: ExactLayout, ranks: int = 2) -> Iterator[Call]:
    """The calls of exact parameters."""
    rows: dict[str, Any] = {"new": layout.dtype, "old": layout.dtype, "plan": _I32}
    yield Call.of("measure_exact", 1, **rows, layout=layout)
    yield Call.of("encode_exact", 1, **rows, message=_I32, layout=layout)
    yield Call.of("decode_exact", ranks, message=_I32, rows=layout.dtype, layout=layout)


def lag_call(dtype: torch.dtype, rest: int = 0, lead: float = 0.35) -> Call:
    """The call of a lead."""
    return Call.of("undo_lag", rest=rest, decoded=_F32, sent=_F32, out=dtype, lead=lead)


def steer_call(segments: int, destinations: int) -> Call:
    """The call that updates thresholds."""
    floats = dict.fromkeys(("target", "max_boost", "scale", "state"), _F32)
    return Call.of("steer", segments, destinations, counts=_I32, **floats)


def fingerprint_calls(dtype: torch.dtype) -> Iterator[Call]:
    """The calls that notice changed parameters."""
    for changed in (None, torch.bool):
        yield Call.of("fingerprint", x=dtype, sums=torch.int64, before=torch.int64, changed=changed)


def dense_calls(
    layout: DenseLayout, dtype: torch.dtype, divisor: int, *, stamped: bool, ranks: int = 8
) -> Iterator[Call]:
    """The calls for uncompressed elements.

    Args:
        stamped: whether messages have stamps.
    """
    stamp, wrong = (_I32, torch.bool) if stamped else (None, None)
    yield Call.of("put_dense", ranks, x=dtype, message=_I32, stamp=stamp, layout=layout)
    given: dict[str, Any] = {"message": _I32, "out": dtype}
    options: dict[str, Any] = {"wrong": wrong, "layout": layout}
    yield Call.of("sum_dense", ranks, 1, **given, stamp=None, **options, divisor=1)
    yield Call.of("sum_dense", 1, ranks, **given, stamp=stamp, **options, divisor=divisor)


def merged_calls(
    layout: BlockLayout | AnyMatrices,
    dense: DenseLayout,
    dtypes: Dtypes,
    average: float,
    divisor: int,
    *,
    stamped: bool,
    ranks: int = 8,
) -> Iterator[Call]:
    """The calls for blocks or matrices and uncompressed elements of the same messages."""
    gradient, residual = dtypes
    blocks, layouts = isinstance(layout, BlockLayout), {"layout": layout, "dense": dense}
    stamp, wrong = (_I32, torch.bool) if stamped else (None, None)
    put: dict[str, Any] = {
        "grad": gradient, "residual": residual, "message": _I32, "dither": None,
        "x": gradient, "whole": _I32, "stamp": stamp, "average": average, **layouts,
    }  # fmt: skip
    if blocks and residual is None:
        put |= {"dither": _I32, "average": 0.0}
    yield Call.of("quantize_and_put", ranks, **put, sums=None, before=None)
    yield Call.of("quantize_and_put", 1, **put, sums=torch.int64, before=torch.int64)
    total: dict[str, Any] = {
        "message": _I32, "out": gradient, "whole": _I32, "rows": gradient, "stamp": stamp,
        "wrong": wrong, "sent": None, "ahead": None, "divisor": divisor, "add": False,
        "lead": 1.0, **layouts,
    }  # fmt: skip
    yield Call.of("dequantize_and_sum", ranks, 1, **total | {"stamp": None, "divisor": 1})
    yield Call.of("dequantize_and_sum", 1, ranks, **total)
    if not blocks:
        lag = {"out": _F32, "sent": _F32, "ahead": gradient, "lead": 0.65}
        yield Call.of("dequantize_and_sum", 1, ranks, **total | lag)


def encoder_calls(
    layout: SketchLayout, dtypes: Dtypes, divisor: int, ranks: int = 2, capacity: int | None = None
) -> Iterator[Call]:
    """Those of codec ``sketch``. A rank may keep ``capacity`` groups; default: the keys, divided
    among all."""
    gradient, residual = dtypes
    capacity = layout.keys // ranks if capacity is None else capacity
    options = {"layout": layout, "levels": layout.symbol.levels(ranks), "capacity": capacity}
    written = {"index": _I32, "cells": _I32, "counts": _I32}
    for support in (None, _I32):
        yield Call.of(
            "encode", ranks, grad=gradient, residual=residual, threshold=_F32, step=_F32,
            seed=_I32, **written, support=support, **options,
        )  # fmt: skip
    yield Call.of(
        "select", 1, x=residual or _F32, threshold=_F32, bitmap=_I32, counts=_I32,
        layout=layout, capacity=capacity,
    )  # fmt: skip
    yield Call.of(
        "decode", ranks, index=_I32, cells=_I32, step=_F32, seed=_I32, out=gradient,
        residual=residual, stats=_I32, layout=layout, divisor=divisor,
    )  # fmt: skip
