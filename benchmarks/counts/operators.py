"""The operators that are counted, with the layouts that the codecs plan, and what is known of
their data. Every function makes an operator's tensors; they take addresses and no memory."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tagc.codecs.selection.capacity import capacity_for
from tagc.ops.blocks import BlockLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.packed import PackedLayout, plan_packed
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import SYMBOLS

from .cases import Case
from .language import Call, Hint, Result
from .peeling import simulate
from .values import binomial_at_most, value

# Thresholds keep a little less than the capacity, which is what trimming looks at.
_KEPT = 0.95


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator with its arguments.

    Attributes:
        call: calls it.
        floor: bytes that any implementation moves.
        hints: what arguments of kernels hold, by the name of an argument, or by
            ``kernel.argument``.
        results: what is known of device functions, by ``kernel.function``.
        note: what the simulation of peeling found.
    """

    call: Callable[[], object]
    floor: float
    hints: dict[str, Hint] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    note: str = ""


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _sizes(case: Case) -> tuple[int, int, int, int]:
    """Rows, elements of a row; bytes of an element of the gradient, and of the residual, twice."""
    left = 0 if case.residual is None else 2 * getattr(torch, case.residual).itemsize
    return case.rows, case.numel // case.rows, getattr(torch, case.gradient).itemsize, left


def _rows(case: Case, dtype: str | None, rows: int | None = None) -> Any:
    """Of the gradient or the residual; None for no dtype."""
    R, n, _, _ = _sizes(case)
    return dtype and _empty(rows or R, n, dtype=getattr(torch, dtype))


def _sending(case: Case, words: int) -> float:
    """Bytes of reading the gradient, updating the residual, and writing so many words a row."""
    R, n, each, left = _sizes(case)
    return R * (n * (each + left) + 4 * words)


def _receiving(case: Case, words: int) -> float:
    """Bytes of reading so many words a row, and writing their sum."""
    R, n, each, _ = _sizes(case)
    return n * each + 4 * R * words


def _quantize(ops: Any, case: Case) -> Operator:
    R, n, _, _ = _sizes(case)
    layout = BlockLayout(numel=n, bits=case.bits, block=case.block)
    x, residual = _rows(case, case.gradient), _rows(case, case.residual)
    message, seeds = _empty(R, layout.words), _empty(R) if case.dithered else None
    return Operator(
        call=lambda: ops.quantize(
            x, residual, message, layout=layout, average=case.average, dither=seeds
        ),
        floor=_sending(case, layout.words),
    )


def _dequantize(ops: Any, case: Case) -> Operator:
    R, n, _, _ = _sizes(case)
    layout = BlockLayout(numel=n, bits=case.bits, block=case.block)
    message, out = _empty(1, R, layout.words), _rows(case, case.gradient, 1)
    return Operator(
        call=lambda: ops.dequantize(message, out, layout=layout, divisor=R),
        floor=_receiving(case, layout.words),
    )


# Of a layer of a 7B model: as many columns; rows follow.
_COLUMNS = 4096


def _matrix_layout(case: Case) -> MatrixLayout:
    rows = case.numel // case.rows // _COLUMNS
    return MatrixLayout(rows=rows, columns=_COLUMNS, bits=case.bits, group=case.group)


def _quantize_matrix(ops: Any, case: Case) -> Operator:
    layout = _matrix_layout(case)
    x, residual = _rows(case, case.gradient), _rows(case, case.residual)
    message = _empty(case.rows, layout.words)
    return Operator(
        call=lambda: ops.quantize_matrix(x, residual, message, layout=layout, average=case.average),
        floor=_sending(case, layout.words),
    )


def _dequantize_matrix(ops: Any, case: Case) -> Operator:
    layout = _matrix_layout(case)
    message, out = _empty(1, case.rows, layout.words), _rows(case, case.gradient, 1)
    return Operator(
        call=lambda: ops.dequantize_matrix(message, out, layout=layout, divisor=case.rows),
        floor=_receiving(case, layout.words),
    )


def _packed_layout(case: Case) -> tuple[PackedLayout, int]:
    """And the groups that are kept."""
    _, n, _, _ = _sizes(case)
    assert case.density is not None
    capacity = capacity_for(case.density, -(-n // case.group))
    layout = plan_packed(n, capacity=capacity, group=case.group, bits=case.bits, block=case.block)
    return layout, int(_KEPT * capacity)


def _bits(kept: int, groups: int) -> Hint:
    return Hint(share=min(1.0, kept / groups), bits=True)


def _selecting(layout: PackedLayout | SketchLayout, kept: int) -> dict[str, Hint]:
    """Hints for what selects and trims: so many groups are above the threshold, and all stay."""
    return {
        "counts": Hint(number=lambda _: kept),
        "digit_kernel.index": _bits(kept, layout.groups),
        "narrow_kernel.index": _bits(kept, layout.groups),
    }


def _pack(ops: Any, case: Case) -> Operator:
    layout, kept = _packed_layout(case)
    x, residual = _rows(case, case.gradient), _rows(case, case.residual)
    message, counts = _empty(case.rows, layout.words), _empty(case.rows, 4)
    threshold = _empty(case.rows, dtype=torch.float32)
    return Operator(
        call=lambda: ops.pack(x, residual, threshold, message, counts, layout=layout),
        floor=_sending(case, layout.words),
        hints=_selecting(layout, kept)
        | {
            "total": Hint(number=lambda _: kept),
            "bitmap": _bits(kept, layout.groups),
            "keys": Hint(listed=True),
        },
    )


def _unpack(ops: Any, case: Case) -> Operator:
    R, n, _, _ = _sizes(case)
    layout, kept = _packed_layout(case)
    message, out = _empty(R, layout.words), _empty(n, dtype=getattr(torch, case.gradient))
    hints = {"bitmap": _bits(kept, layout.groups)}
    if layout.low_bits:
        hints["read_kernel.high"] = _bits(kept, 32 * max(1, layout.high_words))
    turns, slots = _turns(layout, kept)

    def start(call: Call) -> Any:
        offset, _, run, _ = call.arguments
        before = int(offset.offset.number) + int(run.number)
        # So many slots that messages and tiles together take as many turns as expected.
        return replace(call.result, place=math.floor(turns * before) * slots)

    return Operator(
        call=lambda: ops.unpack(message, out, layout=layout, divisor=R),
        floor=_receiving(case, layout.words),
        hints=hints,
        results={"unpack_kernel.run_start": start},
    )


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


def _select(ops: Any, case: Case) -> Operator:
    layout, kept = _packed_layout(case)
    x = _rows(case, case.gradient)
    bitmap, counts = _empty(case.rows, layout.bitmap_words), _empty(case.rows, 4)
    threshold = _empty(case.rows, dtype=torch.float32)
    return Operator(
        call=lambda: ops.select(x, threshold, bitmap, counts, layout=layout),
        floor=_sending(case, layout.bitmap_words),
        hints=_selecting(layout, kept),
    )


def _sketch_layout(case: Case) -> tuple[SketchLayout, int]:
    """And the groups that a rank has room for."""
    R, n, _, _ = _sizes(case)
    assert case.density is not None
    assert case.symbol is not None
    symbol = SYMBOLS[case.symbol]
    capacity = capacity_for(case.density, -(-n // symbol.lanes))
    return plan_layout(n, symbol, R * capacity), capacity


def _encode(ops: Any, case: Case) -> Operator:
    R = case.rows
    layout, capacity = _sketch_layout(case)
    x, residual = _rows(case, case.gradient), _rows(case, case.residual)
    index, counts = _empty(R, layout.index_words), _empty(R, 4)
    cells, seed = _empty(R, layout.cells), _empty(1)
    scales = _empty(2, R, dtype=torch.float32)
    kept = int(_KEPT * capacity)
    hints = _selecting(layout, kept)
    if not importlib.import_module("tagc.triton_kernels.direct").in_one_pass(layout, residual):
        hints["emit_kernel.index"] = _bits(kept, layout.groups)
        hints["emit_kernel.stash"] = Hint(listed=True)
    return Operator(
        call=lambda: ops.encode(
            x, residual, scales[0], scales[1], seed, index, cells, counts,
            layout=layout, levels=layout.symbol.levels(R), capacity=capacity,
        ),
        floor=_sending(case, layout.index_words + layout.cells),
        hints=hints,
    )  # fmt: skip


def _union(
    case: Case, layout: SketchLayout, capacity: int
) -> tuple[dict[str, Hint], dict[str, Result], str]:
    """Hints, results and a note for what peels: no group is kept by two ranks, so the table is as
    full as planned."""
    keys = min(layout.groups, int(_KEPT * capacity) * case.rows)
    hints = {"union": _bits(keys, layout.groups)}
    if layout.direct:
        return hints, {}, ""
    more, results, note = _peeling(layout, keys)
    return hints | more, results, note


def _peeling(layout: SketchLayout, keys: int) -> tuple[dict[str, Hint], dict[str, Result], str]:
    """As :mod:`.peeling` simulates it."""
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
    hints = {
        "pending": Hint(number=lambda at: round(found.sizes[at] / found.scale)),
        "entry": Hint(share=ours),
        "peel_kernel.stash": Hint(hashed=True),
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

    results = {
        "peel_kernel._number": number,
        "peel_kernel.cell_at": other,
        "peel_kernel._remove": removed,
        # Nothing is left for it.
        "finish_kernel._number": lambda call: value(0),
    }
    note = (
        f"{keys} keys, peeled from {found.sizes[0] / found.scale:.0f} cells on, "
        f"{found.taken / found.recovered:.3g} cells a key"
    )
    return hints, results, note


def _decode(ops: Any, case: Case) -> Operator:
    R, n, _, _ = _sizes(case)
    layout, capacity = _sketch_layout(case)
    index, cells = _empty(R, layout.index_words), _empty(layout.cells)
    step, seed, stats = _empty(1, dtype=torch.float32), _empty(1), _empty(2)
    out = _empty(n, dtype=getattr(torch, case.gradient))
    residual = case.residual and _empty(n, dtype=getattr(torch, case.residual))
    hints, results, note = _union(case, layout, capacity)
    if not layout.direct:
        # Nothing is left over.
        hints["estimate_kernel.marks"] = Hint(share=0.0, bits=True)
        if residual is not None:
            hints["clear_kernel.marks"] = Hint(share=0.0, bits=True)
    return Operator(
        call=lambda: ops.decode(
            index, cells, step, seed, out, residual, stats, layout=layout, divisor=R
        ),
        floor=_receiving(case, layout.index_words) + 4 * layout.cells,
        hints=hints,
        results=results,
        note=note,
    )


def _insert(ops: Any, case: Case) -> Operator:
    layout, capacity = _sketch_layout(case)
    symbols, cells = _empty(layout.groups), _empty(layout.cells)
    index, seed = _empty(layout.words), _empty(1)
    keys = min(layout.groups, int(_KEPT * capacity) * case.rows)
    share = keys / layout.groups
    # Of the symbols, the sectors that have one.
    floor = 4 * (layout.words + layout.cells + layout.groups * (1 - (1 - share) ** 8))
    return Operator(
        call=lambda: ops.insert(symbols, index, seed, cells, layout=layout),
        floor=floor,
        hints={"index": _bits(keys, layout.groups), "stash": Hint(listed=True)},
    )


def _peel(ops: Any, case: Case) -> Operator:
    layout, capacity = _sketch_layout(case)
    cells, index, seed = _empty(layout.cells), _empty(layout.words), _empty(1)
    hints, results, note = _union(case, layout, capacity)
    return Operator(
        call=lambda: ops.peel(cells, index, seed, layout=layout),
        floor=4 * (layout.words + layout.cells) + 5 * layout.groups,
        hints=hints | {"expand_kernel.marks": Hint(share=0.0)},
        results=results,
        note=note,
    )


def _undo_lag(ops: Any, case: Case) -> Operator:
    n = case.numel
    decoded, sent, weights = (_empty(size, dtype=torch.float32) for size in (n, n, 2))
    out = _empty(n, dtype=getattr(torch, case.gradient))
    return Operator(
        call=lambda: ops.undo_lag(decoded, sent, out, weights),
        floor=n * (3 * 4 + out.element_size()),
    )


OPERATORS: dict[str, Callable[[Any, Case], Operator]] = {
    "quantize": _quantize, "dequantize": _dequantize,
    "quantize_matrix": _quantize_matrix, "dequantize_matrix": _dequantize_matrix,
    "pack": _pack, "unpack": _unpack, "select": _select,
    "encode": _encode, "decode": _decode, "insert": _insert, "peel": _peel,
    "undo_lag": _undo_lag,
}  # fmt: skip
