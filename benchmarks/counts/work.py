"""What is counted: operators with the layouts that the codecs plan, on tensors that take no memory.

A gradient has ``2**28`` elements in all: so many rows (destinations, or messages) of equal length.
Tensors are made but never touched, so that the system gives them addresses and no memory; the
operators' own torch calls (zeros, copies) are noted and not executed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tagc.codecs.selection.capacity import capacity_for
from tagc.ops.blocks import BlockLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.packed import PackedLayout, plan_packed
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import SYMBOLS

from ..compiled import Launch, compiling
from .language import Hint

NUMEL = 1 << 28
# Thresholds keep a little less than the capacity, which is what trimming looks at.
_KEPT = 0.95
_MOST_ROUNDS = 1000
# As policies have it.
_BLOCK = 256
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One operator on one kind of input.

    Attributes:
        rows: destinations of a gradient, or messages that are added up.
        density: share of the elements that a rank keeps.
    """

    op: str
    gradient: str = "bfloat16"
    residual: str | None = "bfloat16"
    rows: int = 8
    bits: int = 4
    block: int = _BLOCK
    group: int = 1
    density: float | None = None
    symbol: str | None = None
    average: float = 0.0
    numel: int = NUMEL

    @property
    def name(self) -> str:
        """Such as ``quantize/bfloat16/bfloat16/8 rows/int4``."""
        parts = [self.op, self.gradient, self.residual or "none", f"{self.rows} rows"]
        if self.density is not None:
            parts.append(f"{100 * self.density:g}%")
        if self.symbol is not None:
            parts.append(self.symbol)
        else:
            parts.append(f"int{self.bits}")
        if self.group > 1:
            parts.append(f"group {self.group}")
        if self.average:
            parts.append("average")
        if self.block != _BLOCK:
            parts.append(f"block {self.block}")
        return "/".join(parts)


@dataclass(kw_only=True)
class Asked:
    """What an operator asks of the device.

    Attributes:
        launches: of kernels, in their order.
        torch: bytes that each of torch's own kernels moves.
        floor: bytes that any implementation moves.
        hints: see :class:`.language.Hint`.
        note: what is assumed of the input.
    """

    launches: list[Launch] = field(default_factory=list)
    torch: list[float] = field(default_factory=list)
    floor: float = 0.0
    hints: Mapping[str, Hint] = field(default_factory=dict)
    note: str = ""


class _Noted(TorchDispatchMode):
    """Notes torch's kernels instead of running them."""

    def __init__(self, moved: list[float]) -> None:
        super().__init__()
        self._moved = moved

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        written = [
            i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
        ]
        if not written:
            return func(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        self._moved.append(float(sum(x.numel() * x.element_size() for x in tensors)))
        at = written[0]
        return args[at] if at < len(args) else kwargs[schema.arguments[at].name]


def ask(work: Work, arch: int) -> Asked:
    """Run an operator, compiling for ``arch`` and launching nothing."""
    ops = importlib.import_module("tagc.triton_kernels.ops")
    asked = Asked()
    try:
        with compiling(arch, asked.launches.append):
            call = _OPS[work.op](ops, work, asked)
            with _Noted(asked.torch):
                call()
    finally:
        ops.release()
    return asked


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _sizes(work: Work) -> tuple[int, int, int, int]:
    """Rows, elements of a row; bytes of an element of the gradient, and of the residual, twice."""
    n = work.numel // work.rows
    left = 0 if work.residual is None else 2 * _DTYPES[work.residual].itemsize
    return work.rows, n, _DTYPES[work.gradient].itemsize, left


def _gradient(work: Work) -> tuple[Tensor, Tensor | None]:
    R, n, _, _ = _sizes(work)
    x = _empty(R, n, dtype=_DTYPES[work.gradient])
    return x, None if work.residual is None else _empty(R, n, dtype=_DTYPES[work.residual])


def _quantize(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    R, n, each, left = _sizes(work)
    layout = BlockLayout(numel=n, bits=work.bits, block=work.block)
    x, residual = _gradient(work)
    message = _empty(R, layout.words)
    asked.floor = R * (n * (each + left) + 4 * layout.words)
    return lambda: ops.quantize(x, residual, message, layout=layout, average=work.average)


def _dequantize(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    R, n, each, _ = _sizes(work)
    layout = BlockLayout(numel=n, bits=work.bits, block=work.block)
    message, out = _empty(1, R, layout.words), _empty(1, n, dtype=_DTYPES[work.gradient])
    asked.floor = n * each + 4 * R * layout.words
    return lambda: ops.dequantize(message, out, layout=layout, divisor=R)


# Of a layer of a 7B model: as many columns; rows follow.
_COLUMNS = 4096


def _matrix_layout(work: Work) -> MatrixLayout:
    _, n, _, _ = _sizes(work)
    columns = min(_COLUMNS, n)
    return MatrixLayout(rows=n // columns, columns=columns, bits=work.bits, group=work.group)


def _quantize_matrix(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    R, n, each, left = _sizes(work)
    layout = _matrix_layout(work)
    x, residual = _gradient(work)
    message = _empty(R, layout.words)
    asked.floor = R * (n * (each + left) + 4 * layout.words)
    return lambda: ops.quantize_matrix(x, residual, message, layout=layout, average=work.average)


def _dequantize_matrix(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    R, n, each, _ = _sizes(work)
    layout = _matrix_layout(work)
    message, out = _empty(R, layout.words), _empty(n, dtype=_DTYPES[work.gradient])
    asked.floor = n * each + 4 * R * layout.words
    return lambda: ops.dequantize_matrix(message, out, layout=layout, divisor=R)


def _packed_layout(work: Work) -> PackedLayout:
    _, n, _, _ = _sizes(work)
    assert work.density is not None
    capacity = capacity_for(work.density, -(-n // work.group))
    return plan_packed(n, capacity=capacity, group=work.group, bits=work.bits, block=work.block)


def _kept(kept: int, density: float) -> dict[str, Hint]:
    """Hints for what selects: the counters say ``kept``, bitmaps have so many bits set."""
    number = Hint(number=lambda _: kept)
    bits = Hint(share=density)
    return {
        "counts": number, "total": number,
        "index": bits, "bitmap": bits, "union": bits, "support": bits, "marks": bits,
        "keys": Hint(listed=True),
    }  # fmt: skip


def _pack(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    R, n, each, left = _sizes(work)
    layout = _packed_layout(work)
    x, residual = _gradient(work)
    message, counts = _empty(R, layout.words), _empty(R, 4)
    threshold = _empty(R, dtype=torch.float32)
    asked.floor = R * (n * (each + left) + 4 * layout.words)
    kept = int(_KEPT * layout.capacity)
    asked.hints = _kept(kept, kept / layout.groups)
    asked.note = f"{100 * kept / layout.groups:.3g}% of the groups above the threshold, evenly"
    return lambda: ops.pack(x, residual, threshold, None, message, counts, layout=layout)


def _unpack(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    R, n, each, _ = _sizes(work)
    layout = _packed_layout(work)
    message, out = _empty(R, layout.words), _empty(n, dtype=_DTYPES[work.gradient])
    asked.floor = n * each + 4 * R * layout.words
    kept = int(_KEPT * layout.capacity)
    asked.hints = _kept(kept, kept / layout.groups)
    asked.note = f"{100 * kept / layout.groups:.3g}% of the groups in every message, evenly"
    return lambda: ops.unpack(message, None, out, layout=layout, divisor=R)


def _select(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    R, n, each, _ = _sizes(work)
    layout = _packed_layout(work)
    x, _ = _gradient(work)
    bitmap, counts = _empty(R, layout.bitmap_words), _empty(R, 4)
    threshold = _empty(R, dtype=torch.float32)
    asked.floor = R * (n * each + 4 * layout.bitmap_words)
    kept = int(_KEPT * layout.capacity)
    asked.hints = _kept(kept, kept / layout.groups)
    asked.note = f"{100 * kept / layout.groups:.3g}% of the groups above the threshold, evenly"
    return lambda: ops.select(x, threshold, bitmap, counts, layout=layout)


def _sketch_layout(work: Work) -> tuple[SketchLayout, int]:
    R, n, _, _ = _sizes(work)
    assert work.density is not None
    assert work.symbol is not None
    symbol = SYMBOLS[work.symbol]
    capacity = capacity_for(work.density, -(-n // symbol.lanes))
    return plan_layout(n, symbol, R * capacity), capacity


def _encode(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    R, n, each, left = _sizes(work)
    layout, capacity = _sketch_layout(work)
    x, residual = _gradient(work)
    index, counts = _empty(R, layout.index_words), _empty(R, 4)
    cells = _empty(R, layout.cells, dtype=layout.symbol.dtype)
    scales = _empty(2, R, dtype=torch.float32)
    seed = _empty(1)
    asked.floor = R * (n * (each + left) + 4 * layout.index_words + 4 * layout.cells)
    kept = int(_KEPT * capacity)
    asked.hints = _kept(kept, kept / layout.groups)
    asked.note = f"{100 * kept / layout.groups:.3g}% of the groups above the threshold, evenly"
    return lambda: ops.encode(
        x, residual, scales[0], scales[1], seed, index, cells, counts,
        layout=layout, levels=layout.symbol.levels(R), capacity=capacity,
    )  # fmt: skip


def _union(work: Work, layout: SketchLayout, capacity: int, asked: Asked) -> None:
    """Hints for what peels: no group is kept by two ranks, so the table is as full as planned."""
    keys = min(layout.groups, int(_KEPT * capacity) * work.rows)
    share = keys / layout.groups
    left = peeling(layout, keys)
    rounds = len(left)
    # Over all sweeps, the share of keys that one still finds, and that one recovers.
    still = sum(left) / max(1, rounds)
    asked.hints = _kept(keys, share) | {
        "index": Hint(share=_KEPT * capacity / layout.groups),
        "stats": Hint(number=lambda _: keys),
        # A launch of integer symbols sweeps eight times, of floats once.
        "flags": Hint(number=lambda at: int(at * (8 if layout.symbol.integer else 1) < rounds)),
        "keys": Hint(listed=True, share=still),
        "entry": Hint(share=1 / max(1, rounds)),
        # Nothing is left over.
        "estimate_kernel.keys": Hint(share=0.0),
        "expand_kernel.keys": Hint(),
    }
    asked.note = (
        f"{100 * share:.3g}% of the groups in the union, evenly: {keys} keys, peeled in {rounds} "
        "sweeps over all of them"
    )


def peeling(layout: SketchLayout, keys: int) -> list[float]:
    """Share of the keys left before each round of peeling, by density evolution: with ``h`` hashes
    and ``c`` cells for each key, ``x^h`` after ``x <- 1 - exp(-h / c * x^(h-1))`` from 1 on, until
    less than one key is left (M. Molloy, "Cores in random hypergraphs and Boolean formulas",
    Random Structures and Algorithms 27, 2005)."""
    left: list[float] = []
    if layout.direct:
        return left
    x, ratio = 1.0, layout.hashes * keys / layout.cells
    while keys * x**layout.hashes >= 1 and len(left) < _MOST_ROUNDS:
        left.append(x**layout.hashes)
        x = 1 - math.exp(-ratio * x ** (layout.hashes - 1))
    return left


def _decode(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    R, n, each, _ = _sizes(work)
    layout, capacity = _sketch_layout(work)
    index, cells = _empty(R, layout.index_words), _empty(layout.cells, dtype=layout.symbol.dtype)
    step, seed, stats = _empty(1, dtype=torch.float32), _empty(1), _empty(2)
    out = _empty(n, dtype=_DTYPES[work.gradient])
    residual = None if work.residual is None else _empty(n, dtype=_DTYPES[work.residual])
    asked.floor = n * each + 4 * R * layout.index_words + 4 * layout.cells
    _union(work, layout, capacity, asked)
    return lambda: ops.decode(
        index, cells, step, seed, out, residual, stats, layout=layout, divisor=R
    )


def _insert(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    layout, capacity = _sketch_layout(work)
    symbols = _empty(layout.groups, dtype=layout.symbol.dtype)
    index, seed = _empty(layout.words), _empty(1)
    cells = _empty(layout.cells, dtype=layout.symbol.dtype)
    # Of the symbols, the sectors that have one.
    _union(work, layout, capacity, asked)
    share = asked.hints["bitmap"].share
    asked.hints = dict(asked.hints) | {"index": Hint(share=share)}
    asked.floor = 4 * (layout.words + layout.cells + layout.groups * (1 - (1 - share) ** 8))
    return lambda: ops.insert(symbols, index, seed, cells, layout=layout)


def _peel(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    layout, capacity = _sketch_layout(work)
    cells = _empty(layout.cells, dtype=layout.symbol.dtype)
    index, seed = _empty(layout.words), _empty(1)
    _union(work, layout, capacity, asked)
    asked.hints = dict(asked.hints) | {"index": Hint(share=asked.hints["bitmap"].share)}
    asked.floor = 4 * (layout.words + layout.cells) + 5 * layout.groups
    return lambda: ops.peel(cells, index, seed, layout=layout)


_OPS: dict[str, Callable[[Any, Work, Asked], Callable[[], object]]] = {
    "quantize": _quantize, "dequantize": _dequantize,
    "quantize_matrix": _quantize_matrix, "dequantize_matrix": _dequantize_matrix,
    "pack": _pack, "unpack": _unpack, "select": _select,
    "encode": _encode, "decode": _decode, "insert": _insert, "peel": _peel,
}  # fmt: skip
OPS = tuple(_OPS)
