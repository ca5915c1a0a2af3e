"""Every kind of call, for a full check: all formats, with dtypes in turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tagc.ops.blocks import BITS, MAX_BLOCK, MIN_BLOCK, BlockLayout
from tagc.ops.matrix import BITS as MATRIX_BITS
from tagc.ops.matrix import GROUP, MatrixLayout
from tagc.ops.packed import GROUPS as PACKED_GROUPS
from tagc.ops.packed import plan_packed
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import SYMBOLS
from tagc.selfcheck.calls import Call

_I32, _F32 = torch.int32, torch.float32
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
_RESIDUALS = (torch.float32, torch.bfloat16, None)
_DTYPES = list(itertools.product(_GRADIENTS, _RESIDUALS))


def every_call() -> Iterator[Call]:
    """Calls that together cover every format and every pair of dtypes of each operator."""
    dtypes = itertools.cycle(_DTYPES)
    averages, divisors = itertools.cycle((0.0, 0.9)), itertools.cycle((2, 3, 8))
    for bits, block in itertools.product(BITS, (MIN_BLOCK, 256, MAX_BLOCK)):
        layout = BlockLayout(numel=4 * block + 16 * (bits + 1), bits=bits, block=block)
        chosen = next(dtypes), next(averages), next(divisors)
        yield from _elementwise("quantize", layout, *chosen, ("dither", None))
        yield _dithered(layout, chosen[0][0])
    counts = itertools.cycle((1, 2, 2, 1))
    codes = [*((bits, 1) for bits in MATRIX_BITS), (1, GROUP)]
    for (bits, group), columns in itertools.product(codes, (72, 5000)):
        layout = MatrixLayout(rows=11, columns=columns, bits=bits, group=group, count=next(counts))
        chosen = next(dtypes), next(averages), next(divisors)
        yield from _elementwise("quantize_matrix", layout, *chosen)
    # Indexes of each form, with few and many low bits, and with room for all groups.
    densities = itertools.cycle((0.002, 0.05, 0.4, 1.0, 0.01))
    for group in 3 * PACKED_GROUPS:
        yield from _packed(group, next(densities), next(dtypes), next(divisors))
    for dtype in _GRADIENTS:
        tensors = (("decoded", _F32), ("sent", _F32), ("out", dtype), ("weights", _F32))
        for rest in (0, 3):
            yield Call("undo_lag", (), tensors, (), rest)
    names = (
        ("counts", _I32),
        *((name, _F32) for name in ("target", "max_boost", "scale", "state")),
    )
    for shape in ((1, 1), (2, 8)):
        yield Call("steer", shape, names, ())
    # Tables with 6, 5, 4 and 3 hashes; large tables, which kernels may pack, with 3 and 4.
    keys = itertools.cycle((100, 900, 5000, 1 << 22, 1 << 22, 1 << 19))
    for symbol in [*SYMBOLS.values()] * 2:
        yield from _sketched(symbol.name, next(keys), next(dtypes), next(divisors))


def _dithered(layout: BlockLayout, gradient: torch.dtype) -> Call:
    tensors = (("grad", gradient), ("residual", None), ("message", _I32), ("dither", _I32))
    return Call("quantize", (2,), tensors, (("layout", layout), ("average", 0.0)))


def _elementwise(operator, layout, dtypes, average, divisor, *others) -> Iterator[Call]:
    gradient, residual = dtypes
    yield Call(
        operator,
        (8,),
        (("grad", gradient), ("residual", residual), ("message", _I32), *others),
        (("layout", layout), ("average", average)),
    )
    yield Call(
        f"de{operator}",
        (1, 8),
        (("message", _I32), ("out", gradient)),
        (("layout", layout), ("divisor", divisor)),
    )


def _packed(group: int, density: float, dtypes, divisor: int) -> Iterator[Call]:
    gradient, residual = dtypes
    numel = 32 * 70 * group + 5
    groups = -(-numel // group)
    layout = plan_packed(
        numel, capacity=int(density * groups), group=group, bits=4 if group > 2 else 8
    )
    tensors = (
        ("grad", gradient), ("residual", residual), ("threshold", _F32), ("message", _I32),
        ("counts", _I32),
    )  # fmt: skip
    yield Call("pack", (2,), tensors, (("layout", layout),))
    tensors = (("message", _I32), ("out", gradient))
    yield Call("unpack", (8,), tensors, (("layout", layout), ("divisor", divisor)))
    tensors = (("x", residual or _F32), ("threshold", _F32), ("bitmap", _I32), ("counts", _I32))
    yield Call("select", (2,), tensors, (("layout", layout),))
    for operator in ("write_index", "read_index"):
        tensors = (("bitmap", _I32), ("index", _I32))
        if operator == "read_index":
            tensors = tensors[::-1]
        yield Call(operator, (2,), tensors, (("layout", layout),))


def _sketched(name: str, keys: int, dtypes, divisor: int) -> Iterator[Call]:
    gradient, residual = dtypes
    symbol = SYMBOLS[name]
    layout = plan_layout(symbol.lanes * keys * 20 + 3, symbol, keys)
    W = 2
    for support in (None, _I32):
        tensors = (
            ("grad", gradient), ("residual", residual), ("threshold", _F32), ("step", _F32),
            ("seed", _I32), ("index", _I32), ("cells", _I32), ("counts", _I32),
            ("support", support),
        )  # fmt: skip
        options = (("layout", layout), ("levels", symbol.levels(W)), ("capacity", keys // W))
        yield Call("encode", (W,), tensors, options)
    tensors = (
        ("index", _I32), ("cells", _I32), ("step", _F32), ("seed", _I32),
        ("out", gradient), ("residual", residual), ("stats", _I32),
    )  # fmt: skip
    yield Call("decode", (W,), tensors, (("layout", layout), ("divisor", divisor)))
    yield from sketch_calls(layout)


def sketch_calls(layout: SketchLayout) -> Iterator[Call]:
    """The calls of :class:`tagc.CountSketch`."""
    options = (("layout", layout),)
    tensors = (("symbols", _I32), ("index", _I32), ("seed", _I32), ("cells", _I32))
    yield Call("insert", (), tensors, options)
    yield Call("peel", (), (("cells", _I32), ("index", _I32), ("seed", _I32)), options)
