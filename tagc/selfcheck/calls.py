"""Kinds of calls of operators: those that a run makes, and all that there are."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from tagc.ops import Ops
from tagc.ops.blocks import BITS, MAX_BLOCK, MIN_BLOCK, BlockLayout
from tagc.ops.dense import DenseLayout, Piece
from tagc.ops.exact import ExactLayout
from tagc.ops.exponents import ExponentLayout
from tagc.ops.matrix import BITS as MATRIX_BITS
from tagc.ops.matrix import AnyMatrices, Matrices, MatrixLayout
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import SYMBOLS

OPERATORS = (
    "quantize", "dequantize", "quantize_matrix", "dequantize_matrix",
    "measure_exact", "encode_exact", "decode_exact", "pack_exponents", "unpack_exponents",
    "encode", "select", "decode", "insert", "peel", "undo_lag", "steer", "fingerprint",
    "put_dense", "sum_dense", "quantize_and_put", "dequantize_and_sum",
)  # fmt: skip
# Kernels may take several rows at a time, a divisor of this number; further rows are no new case.
ROWS = 8


@dataclass(frozen=True)
class Call:
    """One call of an operator, reduced to the facts that choose a kernel."""

    operator: str  # one of :data:`OPERATORS`
    rows: tuple[int, ...]  # dimensions of the first tensor but the last, at most ROWS + n % ROWS
    dtypes: tuple[tuple[str, torch.dtype | None], ...]  # by argument; None if it was not given
    options: tuple[tuple[str, Hashable], ...]  # the other arguments
    rest: int = 0  # last dimension of the first tensor modulo 16, unless a layout says it

    def dtype(self, argument: str) -> torch.dtype:
        found = dict(self.dtypes)[argument]
        assert found is not None
        return found

    def given(self, argument: str) -> torch.dtype | None:
        """Dtype of a tensor; None if it was not given."""
        return dict(self.dtypes)[argument]

    def option(self, name: str) -> Any:
        return dict(self.options)[name]

    def __str__(self) -> str:
        tensors = (
            f"{name} {str(dtype).removeprefix('torch.')}"
            for name, dtype in self.dtypes
            if dtype is not None and dtype != torch.int32
        )
        options = (f"{name}={value}" for name, value in self.options)
        return f"{self.operator}({', '.join([*tensors, *options])})"


class Recorder:
    """Operators that record their calls and pass them on; takes the place of
    :class:`tagc.ops.Ops`. ``calls`` are the kinds of calls so far, in order of first use; ``new``
    is called after one of a new kind."""

    def __init__(self, ops: Ops, new: Callable[[], None] = lambda: None) -> None:
        self._ops, self._new = ops, new
        self.calls: dict[Call, None] = {}
        for name in OPERATORS:
            setattr(self, name, self._noting(name, getattr(ops, name)))

    def __getattr__(self, name: str) -> Any:
        # Everything else in `Ops`: preparations, and the release of buffers.
        return getattr(self._ops, name)

    @property
    def ops(self) -> Ops:
        return cast(Ops, self)

    def _noting(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(operator)

        def noting(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            returned = operator(*args, **kwargs)
            call = call_of(name, given.arguments)
            if call not in self.calls:
                self.calls[call] = None
                self._new()
            return returned

        return noting


def call_of(operator: str, arguments: dict[str, Any]) -> Call:
    """The call with these arguments. A missing argument is a tensor: options are never missing."""
    tensors = {n: a for n, a in arguments.items() if a is None or isinstance(a, Tensor)}
    first = next(a for a in tensors.values() if a is not None)
    return Call(
        operator,
        tuple(n if n <= ROWS else ROWS + n % ROWS for n in first.shape[:-1]),
        tuple((name, None if a is None else a.dtype) for name, a in tensors.items()),
        tuple((name, a) for name, a in arguments.items() if name not in tensors),
        0 if "layout" in arguments else first.shape[-1] % 16,
    )


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


def _call(operator: str, *rows: int, rest: int = 0, **arguments: Any) -> Call:
    """A call whose tensors are given as dtypes, or None."""
    tensors = {n: a for n, a in arguments.items() if a is None or isinstance(a, torch.dtype)}
    options = ((name, a) for name, a in arguments.items() if name not in tensors)
    return Call(operator, rows, tuple(tensors.items()), tuple(options), rest)


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
    yield _call(operator, ranks, **given, layout=layout, average=average)
    given = {"message": _I32, "out": gradient}
    yield _call(f"de{operator}", 1, ranks, **given, layout=layout, divisor=divisor, add=False)


def dithered_call(layout: BlockLayout, gradient: torch.dtype) -> Call:
    """The call that rounds stochastically."""
    given = {"grad": gradient, "residual": None, "message": _I32, "dither": _I32}
    return _call("quantize", 2, **given, layout=layout, average=0.0)


def exact_calls(layout: ExactLayout, ranks: int = 2) -> Iterator[Call]:
    """The calls of exact parameters."""
    rows: dict[str, Any] = {"new": layout.dtype, "old": layout.dtype, "plan": _I32}
    yield _call("measure_exact", 1, **rows, layout=layout)
    yield _call("encode_exact", 1, **rows, message=_I32, layout=layout)
    yield _call("decode_exact", ranks, message=_I32, rows=layout.dtype, layout=layout)


def exponent_calls(layout: ExponentLayout, ranks: int = 2) -> Iterator[Call]:
    """The calls of exact activations."""
    yield _call("pack_exponents", ranks, rows=torch.bfloat16, message=_I32, layout=layout)
    yield _call("unpack_exponents", ranks, message=_I32, rows=torch.bfloat16, layout=layout)


def lag_call(dtype: torch.dtype, rest: int = 0, lead: float = 0.35) -> Call:
    """The call of a lead."""
    return _call("undo_lag", rest=rest, decoded=_F32, sent=_F32, out=dtype, lead=lead)


def steer_call(segments: int, destinations: int) -> Call:
    """The call that updates thresholds."""
    floats = dict.fromkeys(("target", "max_boost", "scale", "state"), _F32)
    return _call("steer", segments, destinations, counts=_I32, **floats)


def fingerprint_calls(dtype: torch.dtype) -> Iterator[Call]:
    """The calls that notice changed parameters."""
    for changed in (None, torch.bool):
        yield _call("fingerprint", x=dtype, sums=torch.int64, before=torch.int64, changed=changed)


def dense_calls(
    layout: DenseLayout, dtype: torch.dtype, divisor: int, *, stamped: bool, ranks: int = 8
) -> Iterator[Call]:
    """The calls for uncompressed elements.

    Args:
        stamped: whether messages have stamps.
    """
    stamp, wrong = (_I32, torch.bool) if stamped else (None, None)
    yield _call("put_dense", ranks, x=dtype, message=_I32, stamp=stamp, layout=layout)
    given: dict[str, Any] = {"message": _I32, "out": dtype}
    options: dict[str, Any] = {"wrong": wrong, "layout": layout}
    yield _call("sum_dense", ranks, 1, **given, stamp=None, **options, divisor=1)
    yield _call("sum_dense", 1, ranks, **given, stamp=stamp, **options, divisor=divisor)


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
    put, read, total = dense_calls(dense, dtypes[0], divisor, stamped=stamped, ranks=ranks)
    if isinstance(layout, BlockLayout):
        quantize, dequantize = block_calls(layout, dtypes, average, divisor, ranks)
        if dtypes[1] is None:
            quantize = dithered_call(layout, dtypes[0])
    else:
        quantize, dequantize = matrix_calls(layout, dtypes, average, divisor, ranks)
        no_dither = ("dither", None)
        quantize = replace(quantize, dtypes=(*quantize.dtypes, no_dither))
    yield _merged("quantize_and_put", quantize, put, sums=None, before=None)
    of_one_row = replace(put, rows=(1,))
    yield _merged("quantize_and_put", quantize, of_one_row, sums=torch.int64, before=torch.int64)
    for pieces in (read, total):
        yield _merged("dequantize_and_sum", dequantize, pieces, 1.0, sent=None, ahead=None)
    if not isinstance(layout, BlockLayout):
        given = dict(dequantize.dtypes) | {"out": _F32}
        decoded = replace(dequantize, dtypes=tuple(given.items()))
        lag = {"sent": _F32, "ahead": dtypes[0]}
        yield _merged("dequantize_and_sum", decoded, total, 0.65, **lag)


# What a merged operator calls the arguments of its second part.
_RENAMED = {"message": "whole", "out": "rows", "layout": "dense"}
T = TypeVar("T")


def renamed(given: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Arguments of the second part of a merged operator, by their names there."""
    return {_RENAMED.get(name, name): x for name, x in given}


def _merged(
    operator: str,
    codes: Call,
    pieces: Call,
    lead: float | None = None,
    **more: torch.dtype | None,
) -> Call:
    """One call of two, which may have a lead and ``more`` tensors. It has the pieces' rows and
    divisor."""
    dtypes = (*codes.dtypes, *renamed(pieces.dtypes).items(), *more.items())
    options = dict(codes.options) | renamed(pieces.options)
    if lead is not None:
        options["lead"] = lead
    return Call(operator, pieces.rows, dtypes, tuple(options.items()))


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
        yield _call(
            "encode", ranks, grad=gradient, residual=residual, threshold=_F32, step=_F32,
            seed=_I32, **written, support=support, **options,
        )  # fmt: skip
    yield _call(
        "select", 1, x=residual or _F32, threshold=_F32, bitmap=_I32, counts=_I32,
        layout=layout, capacity=capacity,
    )  # fmt: skip
    yield _call(
        "decode", ranks, index=_I32, cells=_I32, step=_F32, seed=_I32, out=gradient,
        residual=residual, stats=_I32, layout=layout, divisor=divisor,
    )  # fmt: skip


def sketch_calls(layout: SketchLayout) -> Iterator[Call]:
    """The calls of :class:`tagc.CountSketch`."""
    yield _call("insert", symbols=_I32, index=_I32, seed=_I32, cells=_I32, layout=layout)
    yield _call("peel", cells=_I32, index=_I32, seed=_I32, layout=layout)
