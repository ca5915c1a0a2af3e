"""The operators that are counted, with the layouts that the codecs plan, and what is known of
their data.

Every function makes an operator's tensors, fills in an :class:`.work.Asked`, and returns the call.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tagc.codecs.selection.capacity import capacity_for
from tagc.ops.blocks import BlockLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.packed import PackedLayout, plan_packed
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import SYMBOLS

from .language import Call, Hint
from .peeling import simulate
from .values import binomial_at_most, value
from .work import Asked, Work

# Thresholds keep a little less than the capacity, which is what trimming looks at.
_KEPT = 0.95
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    seeds = _empty(R) if work.dithered else None
    return lambda: ops.quantize(
        x, residual, message, layout=layout, average=work.average, dither=seeds
    )


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
    message, out = _empty(1, R, layout.words), _empty(1, n, dtype=_DTYPES[work.gradient])
    asked.floor = n * each + 4 * R * layout.words
    return lambda: ops.dequantize_matrix(message, out, layout=layout, divisor=R)


def _packed_layout(work: Work) -> PackedLayout:
    _, n, _, _ = _sizes(work)
    assert work.density is not None
    capacity = capacity_for(work.density, -(-n // work.group))
    return plan_packed(n, capacity=capacity, group=work.group, bits=work.bits, block=work.block)


def _selecting(layout: PackedLayout | SketchLayout, kept: int) -> dict[str, Hint]:
    """Hints for what selects and trims: so many groups are above the threshold, and all stay."""
    return {"counts": Hint(number=lambda _: kept), "count_kernel.index": _bits(kept, layout.groups)}


def _bits(kept: int, groups: int) -> Hint:
    return Hint(share=min(1.0, kept / groups), bits=True)


def _of_high(layout: PackedLayout, kept: int) -> Hint:
    return _bits(kept, 32 * max(1, layout.high_words))


def _pack(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    R, n, each, left = _sizes(work)
    layout = _packed_layout(work)
    x, residual = _gradient(work)
    message, counts = _empty(R, layout.words), _empty(R, 4)
    threshold = _empty(R, dtype=torch.float32)
    asked.floor = R * (n * (each + left) + 4 * layout.words)
    kept = int(_KEPT * layout.capacity)
    asked.hints = _selecting(layout, kept) | {
        "total": Hint(number=lambda _: kept),
        "bitmap": _bits(kept, layout.groups),
        "keys": Hint(listed=True),
    }
    asked.note = f"{100 * kept / layout.groups:.3g}% of the groups above the threshold, evenly"
    return lambda: ops.pack(x, residual, threshold, message, counts, layout=layout)


def _unpack(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    R, n, each, _ = _sizes(work)
    layout = _packed_layout(work)
    message, out = _empty(R, layout.words), _empty(n, dtype=_DTYPES[work.gradient])
    asked.floor = n * each + 4 * R * layout.words
    kept = int(_KEPT * layout.capacity)
    asked.hints = {"bitmap": _bits(kept, layout.groups)}
    if layout.low_bits:
        asked.hints = dict(asked.hints) | {"read_kernel.high": _of_high(layout, kept)}
    turns, slots = _turns(layout, kept)

    def start(call: Call) -> Any:
        offset, _, run, _ = call.arguments
        before = int(offset.offset.number) + int(run.number)
        # So many slots that messages and tiles together take as many turns as expected.
        return replace(call.result, place=math.floor(turns * before) * slots)

    asked.results = {"unpack_kernel.run_start": start}
    asked.note = f"{100 * kept / layout.groups:.3g}% of the groups in every message, evenly"
    return lambda: ops.unpack(message, out, layout=layout, divisor=R)


def _turns(layout: PackedLayout, kept: int) -> tuple[float, int]:
    """How many turns a tile takes for a message, on average, and the slots of one: its groups are
    marked with the same chance, each on its own."""
    unpack = importlib.import_module("tagc.triton_kernels.unpack")
    groups, (_, slots, _) = unpack._TILE // layout.group, unpack.turn_of(layout)
    mean = kept / layout.groups
    turns = 1.0
    for turn in range(1, groups // max(1, slots) + 1):
        turns += 1 - binomial_at_most(turn * slots, groups, mean)
    return turns, slots


def _select(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    R, n, each, _ = _sizes(work)
    layout = _packed_layout(work)
    x, _ = _gradient(work)
    bitmap, counts = _empty(R, layout.bitmap_words), _empty(R, 4)
    threshold = _empty(R, dtype=torch.float32)
    asked.floor = R * (n * each + 4 * layout.bitmap_words)
    kept = int(_KEPT * layout.capacity)
    asked.hints = _selecting(layout, kept)
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
    cells = _empty(R, layout.cells)
    scales = _empty(2, R, dtype=torch.float32)
    seed = _empty(1)
    asked.floor = R * (n * (each + left) + 4 * layout.index_words + 4 * layout.cells)
    kept = int(_KEPT * capacity)
    asked.hints = _selecting(layout, kept)
    if not importlib.import_module("tagc.triton_kernels.direct").in_one_pass(layout, residual):
        asked.hints |= {
            "emit_kernel.index": _bits(kept, layout.groups),
            "emit_kernel.stash": Hint(listed=True),
        }
    asked.note = f"{100 * kept / layout.groups:.3g}% of the groups above the threshold, evenly"
    return lambda: ops.encode(
        x, residual, scales[0], scales[1], seed, index, cells, counts,
        layout=layout, levels=layout.symbol.levels(R), capacity=capacity,
    )  # fmt: skip


def _union(work: Work, layout: SketchLayout, capacity: int, asked: Asked) -> int:
    """Hints for what peels; the keys: no group is kept by two ranks, so the table is as full as
    planned."""
    keys = min(layout.groups, int(_KEPT * capacity) * work.rows)
    asked.hints = {"union": _bits(keys, layout.groups)}
    asked.note = f"{100 * keys / layout.groups:.3g}% of the groups in the union, evenly"
    if not layout.direct:
        _peeling(layout, keys, asked)
    return keys


def _peeling(layout: SketchLayout, keys: int, asked: Asked) -> None:
    """Hints and results for what peels, as :mod:`.peeling` simulates it."""
    peel = importlib.import_module("tagc.triton_kernels.peel")
    table = importlib.import_module("tagc.triton_kernels.table")
    stash = importlib.import_module("tagc.triton_kernels.stash")
    programs = table.peeling_programs(layout)
    found = simulate(
        keys=keys, cells=layout.cells, hashes=layout.hashes, programs=programs,
        launches=peel.launches(layout), limit=peel._STEPS, room=table.ROOM,
        block=stash.LANES_OF_A_STEP,
    )  # fmt: skip
    # Of the cells that hold one key when they are listed, those whose key nobody else took; and of
    # the other cells of a key, those that then hold one.
    ours = found.recovered / found.taken
    freed = 1 - found.sizes[0] / found.taken
    asked.hints = dict(asked.hints) | {
        "pending": Hint(number=lambda at: round(found.sizes[at] / found.scale)),
        "entry": Hint(share=ours),
        "peel_kernel.stash": Hint(hashed=True),
        "finish_kernel.lists": Hint(hashed=True),
        # Symbols and bits of keys: one at a time. Nothing is left over.
        "peel_kernel.marks": Hint(),
        "finish_kernel.marks": Hint(),
    }

    def number(call: Call) -> Any:
        launch, program = int(call.scalars["launch"]), call.program * found.programs // programs
        steps = found.freed[launch][program]
        return value(steps[call.before] if call.before < len(steps) else 0)

    def other(call: Call) -> Any:
        share = (layout.hashes - 1) / layout.hashes
        return replace(call.result, share=share, apart=True)

    def removed(call: Call) -> Any:
        return replace(call.result, share=freed / layout.hashes)

    asked.results = {
        "peel_kernel._number": number,
        "peel_kernel.cell_at": other,
        "peel_kernel._remove": removed,
        # Nothing is left for it.
        "finish_kernel._number": lambda call: value(0),
    }
    asked.note += (
        f": {keys} keys, peeled from {found.sizes[0] / found.scale:.0f} cells on, "
        f"{found.taken / found.recovered:.3g} cells a key"
    )


def _decode(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    R, n, each, _ = _sizes(work)
    layout, capacity = _sketch_layout(work)
    index, cells = _empty(R, layout.index_words), _empty(layout.cells)
    step, seed, stats = _empty(1, dtype=torch.float32), _empty(1), _empty(2)
    out = _empty(n, dtype=_DTYPES[work.gradient])
    residual = None if work.residual is None else _empty(n, dtype=_DTYPES[work.residual])
    asked.floor = n * each + 4 * R * layout.index_words + 4 * layout.cells
    _union(work, layout, capacity, asked)
    if not layout.direct:
        # Nothing is left over.
        nothing = Hint(share=0.0, bits=True)
        asked.hints = dict(asked.hints) | {"estimate_kernel.marks": nothing}
        if residual is not None:
            asked.hints = dict(asked.hints) | {"clear_kernel.marks": nothing}
    return lambda: ops.decode(
        index, cells, step, seed, out, residual, stats, layout=layout, divisor=R
    )


def _insert(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    layout, capacity = _sketch_layout(work)
    symbols = _empty(layout.groups)
    index, seed = _empty(layout.words), _empty(1)
    cells = _empty(layout.cells)
    # Of the symbols, the sectors that have one.
    keys = min(layout.groups, int(_KEPT * capacity) * work.rows)
    share = keys / layout.groups
    asked.hints = {"index": _bits(keys, layout.groups), "stash": Hint(listed=True)}
    asked.note = f"{100 * share:.3g}% of the groups, evenly: {keys} keys"
    asked.floor = 4 * (layout.words + layout.cells + layout.groups * (1 - (1 - share) ** 8))
    return lambda: ops.insert(symbols, index, seed, cells, layout=layout)


def _peel(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    layout, capacity = _sketch_layout(work)
    cells = _empty(layout.cells)
    index, seed = _empty(layout.words), _empty(1)
    _union(work, layout, capacity, asked)
    asked.hints = dict(asked.hints) | {"expand_kernel.marks": Hint(share=0.0)}
    asked.floor = 4 * (layout.words + layout.cells) + 5 * layout.groups
    return lambda: ops.peel(cells, index, seed, layout=layout)


def _undo_lag(ops: Any, work: Work, asked: Asked) -> Callable[[], object]:
    _, n, each, _ = _sizes(work)
    decoded, sent, weights = (_empty(size, dtype=torch.float32) for size in (n, n, 2))
    out = _empty(n, dtype=_DTYPES[work.gradient])
    asked.floor = n * (3 * 4 + each)
    return lambda: ops.undo_lag(decoded, sent, out, weights)


OPERATORS: dict[str, Callable[[Any, Work, Asked], Callable[[], object]]] = {
    "quantize": _quantize, "dequantize": _dequantize,
    "quantize_matrix": _quantize_matrix, "dequantize_matrix": _dequantize_matrix,
    "pack": _pack, "unpack": _unpack, "select": _select,
    "encode": _encode, "decode": _decode, "insert": _insert, "peel": _peel,
    "undo_lag": _undo_lag,
}  # fmt: skip
