"""The table of operators' cases: formats, dtypes, sizes and inputs.

A trial has one format and pair of dtypes, in all sizes that may trip a kernel, with inputs of every
kind, made by :mod:`tagc.selfcheck`; `support/edges.py` has others, where the arithmetic gets tight.
Tests compare every implementation with the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from support.calls import (
    block_calls,
    dense_calls,
    dithered_call,
    encoder_calls,
    every_call,
    exact_calls,
    fingerprint_calls,
    lag_call,
    matrix_calls,
    merged_calls,
    steer_call,
)
from tagc.ops import Ops
from tagc.ops.blocks import BlockLayout
from tagc.ops.dense import DenseLayout, Piece
from tagc.ops.exact import ExactLayout
from tagc.ops.exponents import ExponentLayout
from tagc.ops.matrix import Matrices, MatrixLayout
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import SYMBOLS
from tagc.selfcheck import Call, sketch_calls
from tagc.selfcheck.calls import OPERATORS as OPERATORS
from tagc.selfcheck.calls import exponent_calls
from tagc.selfcheck.cases import case_of as case_of
from tagc.selfcheck.checking import complaint_about
from tagc.selfcheck.inputs import PLACEMENTS as PLACEMENTS
from tagc.selfcheck.inputs import Case as Case
from tagc.selfcheck.inputs import Inputs

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
USUAL, ROUGH, TIES = "usual", "rough", "ties"


@dataclass(frozen=True)
class Trial:
    """Some cases.

    Attributes:
        name: of the operators' family and the format, with the dtypes of gradient and residual.
        makers: functions that make the cases.
        compiled: whether the CPU kernels of these dtypes are compiled before the tests run.
    """

    name: str
    makers: tuple[Callable[[], Iterable[Case]], ...]
    compiled: bool = True

    @classmethod
    def of(cls, name: str, calls: Iterable[tuple[Call, Inputs]], compiled: bool = True) -> Trial:
        """Calls, each with inputs of a kind."""
        return cls(name, tuple(partial(_one, *call) for call in calls), compiled)

    def cases(self) -> Iterator[Case]:
        """Make the cases."""
        for make in self.makers:
            yield from make()

    def check(self, ops: Ops, device: torch.device, *placements: str) -> None:
        """Compare an implementation with the reference, to the bit.

        Args:
            placements: where tensors lie, see :mod:`tagc.selfcheck.inputs`, in turn; default:
                all of them for each case.
        """
        for i, case in enumerate(self.cases()):
            where = {"placements": [placements[i % len(placements)]]} if placements else {}
            complaint = complaint_about(ops, device, case, **where)
            assert complaint is None, f"{case.call}, case {i}: {complaint}"

    def parts(self, count: int) -> list[Trial]:
        """Split the trial into numbered trials of a few sizes each."""
        each, left = divmod(len(self.makers), count)
        assert not left, f"{self.name}: {len(self.makers)} cases cannot be split into {count} parts"
        return [
            replace(self, name=f"{self.name}, {i + 1}", makers=self.makers[i * each :][:each])
            for i in range(count)
        ]


def _one(call: Call, inputs: Inputs) -> list[Case]:
    return [case_of(call, inputs)]


def case_with(operator: str, tensors: Mapping[str, Tensor | None], **options: Any) -> Case:
    """A call of an operator with these tensors."""
    return Case(Call(operator, (), (), tuple(options.items())), dict(tensors), ())


# Rows of a trial's table, and those of all formats: each gets some of them.
Table = list[tuple[Any, ...]]


def _dealt(table: Table, formats: list[Any], each: int | None) -> Iterator[tuple[Any, Table]]:
    """Each format with ``each`` rows of the table, dealt in turn, or with all rows."""
    rows = itertools.cycle(table)
    for format_ in formats:
        yield format_, table if each is None else [next(rows) for _ in range(each)]


def _name(*parts: Any) -> str:
    return " ".join(str(part).removeprefix("torch.") for part in parts)


# bits, gradient, residual. The CPU's kernels are compiled for these before the tests run, for
# seconds each (float16 is widened first); tests with RARER ones on a CPU are slow.
BLOCKS = [
    (4, F32, F32),
    (4, F32, BF16),
    (4, F16, BF16),
    (8, BF16, None),
    (8, F16, F32),
    (8, F32, None),
    (8, F16, None),
]
# bits, gradient: those rounded stochastically.
DITHERED = [(4, F32), (8, F32), (8, BF16)]
RARER_BLOCKS = [
    (4, BF16, F32),
    (4, BF16, BF16),
    (8, F32, F32),
    (8, BF16, F32),
    (8, BF16, BF16),
    (4, F32, None),
]
# block, elements, destinations, average, divisor, messages, kind of inputs
BLOCK_SIZES: Table = [
    (32, 131, 2, 0.0, 1, 2, USUAL),
    (4096, 5000, 2, 0.9, 3, 3, ROUGH),
    (32, 1, 1, 0.0, 2, 1, USUAL),
    (64, 333, 3, 0.3, 2, 4, TIES),
    (32, 31, 1, 0.5, 5, 5, ROUGH),
    (256, 1500, 2, 0.9, 7, 12, USUAL),
    (1024, 1027, 1, 0.0, 6, 6, ROUGH),
    (32, 32, 2, 0.0, 4, 4, TIES),
    (256, 1280, 2, 0.25, 8, 8, ROUGH),
    (32, 33, 1, 0.7, 3, 2, ROUGH),
    (512, 2000, 2, 0.7, 5, 9, USUAL),
    (2048, 2049, 1, 0.0, 1, 1, TIES),
    (64, 1024, 2, 0.5, 4, 4, ROUGH),
    (32, 513, 1, 0.0, 3, 7, ROUGH),
    (256, 257, 3, 0.1, 9, 3, USUAL),
    (256, 0, 2, 0.0, 2, 2, USUAL),
    (32, 544, 1, 0.9, 6, 2, TIES),
]


def _blocks(each: int | None) -> Iterator[Trial]:
    for (bits, grad, residual), rows in _dealt(BLOCK_SIZES, BLOCKS + RARER_BLOCKS, each):
        calls = []
        for block, numel, R, average, divisor, ranks, kind in rows:
            layout = BlockLayout(numel=numel, bits=bits, block=block)
            given = Inputs(kind=kind, destinations=R)
            of_row = block_calls(layout, (grad, residual), average, divisor, ranks)
            calls += [(_twofold(call), given) for call in of_row]
        compiled = (bits, grad, residual) in BLOCKS
        yield Trial.of(_name("blocks", bits, grad, residual), calls, compiled)
    for (bits, grad), rows in _dealt(BLOCK_SIZES, [*DITHERED, (4, BF16), (8, F16)], each):
        calls = []
        for block, numel, R, *_, kind in rows:
            layout = BlockLayout(numel=numel, bits=bits, block=block)
            given = Inputs(kind=kind, destinations=min(R, 2))
            calls.append((dithered_call(layout, grad), given))
        compiled = (bits, grad) in DITHERED or grad == F16
        yield Trial.of(_name("dithered", bits, grad), calls, compiled)


def _twofold(call: Call) -> Call:
    """The call with two results of a decoder instead of one. With an odd number of messages it adds
    to what is there."""
    if len(call.rows) == 1:
        return call
    options = dict(call.options) | {"add": call.rows[1] % 2 == 1}
    return replace(call, rows=(2, call.rows[1]), options=tuple(options.items()))


# bits, gradient, residual
MATRICES = [(1, F32, F32), (1, F32, BF16), (2, BF16, F32)]
RARER_MATRICES = [
    (1, BF16, BF16),
    (1, BF16, F32),
    (1, F32, None),
    (1, F16, BF16),
    (2, F32, BF16),
    (2, F16, BF16),
    (2, BF16, None),
]
# rows, columns, matrices, destinations, level, average, divisor, messages, kind of inputs
MATRIX_SIZES: Table = [
    (11, 131, 1, 2, 1.0, 0.0, 1, 3, USUAL),
    (5, 1100, 1, 1, 1.0, 0.9, 3, 1, ROUGH),
    (1, 1, 1, 2, 1.3, 0.0, 2, 2, USUAL),
    (10, 70, 3, 2, 1.0, 0.3, 2, 2, USUAL),
    (4, 8, 2, 1, 0.5, 0.7, 4, 4, TIES),
    (17, 200, 1, 2, 1.0, 0.0, 4, 4, ROUGH),
    (1, 300, 1, 1, 1.0, 0.5, 7, 5, USUAL),
    (7, 33, 1, 3, 2.0, 0.0, 6, 6, ROUGH),
    (16, 1, 2, 1, 1.0, 0.5, 3, 3, USUAL),
    (8, 128, 4, 1, 1.0, 0.0, 4, 2, ROUGH),
    (3, 450, 1, 2, 3.9, 0.9, 8, 8, TIES),
    (0, 7, 2, 2, 1.0, 0.0, 2, 2, USUAL),
    (16, 64, 1, 3, 0.3, 0.7, 5, 9, USUAL),
]


def _matrices(each: int | None) -> Iterator[Trial]:
    formats = MATRICES + RARER_MATRICES
    for (bits, grad, residual), table in _dealt(MATRIX_SIZES, formats, each):
        calls = []
        for rows, columns, count, D, level, average, divisor, ranks, kind in table:
            layout = MatrixLayout(rows=rows, columns=columns, bits=bits, level=level, count=count)
            given = Inputs(kind=kind)
            if count == 2:
                before = replace(layout, rows=rows + 2, count=1)
                layout = Matrices((before, layout, replace(layout, rows=3, columns=columns + 24)))
            elif count == 4:  # more shapes than one launch takes
                shapes = ((6, 40), (2, 16), (5, 40), (9, 5))
                others = (replace(layout, rows=r, columns=c, count=1) for r, c in shapes)
                layout = Matrices((layout, *others))
            encoder, decoder = matrix_calls(layout, (grad, residual), average, divisor, ranks)
            calls += [(replace(encoder, rows=(D,)), given), (_twofold(decoder), given)]
        compiled = (bits, grad, residual) in MATRICES
        yield Trial.of(_name("matrix", bits, grad, residual), calls, compiled)


# symbol, gradient, residual
SKETCHES = [
    ("int8x4", F32, F32),
    ("int8x4", F16, F32),
    ("int8x4", BF16, BF16),
    ("int16x2", BF16, F32),
    ("int32x1", F32, F32),
    ("int32x1", BF16, None),
]
RARER_SKETCHES = [
    ("int8x4", F32, None),
    ("int16x2", F32, BF16),
    ("int16x2", F16, BF16),
    ("int32x1", F32, BF16),
    ("int8x4", F32, BF16),
    ("int16x2", F32, None),
]
# elements, share that the capacity holds, share above the threshold, hashes (0: the table that is
# planned, 1: a cell for each group), cells for each key, ranks, divisor, kind of inputs
SKETCH_SIZES: Table = [
    (2051, 0.2, 0.5, 4, 3.0, 2, 3, USUAL),
    (129, 1.0, 0.2, 0, 3.0, 2, 5, ROUGH),
    (4099, 0.2, 0.5, 3, 3.0, 2, 2, TIES),
    (1027, 0.2, 0.1, 5, 3.0, 3, 1, ROUGH),
    (1500, 0.2, 0.4, 1, 1.0, 2, 2, USUAL),
    (600, 0.5, 1.0, 3, 0.5, 2, 2, USUAL),
    (33, 0.3, 1.0, 0, 3.0, 2, 7, TIES),
    (777, 0.2, 0.5, 6, 3.0, 2, 6, USUAL),
    (1031, 0.0, 0.3, 4, 3.0, 2, 3, USUAL),
    (2600, 0.3, 0.0, 0, 3.0, 3, 3, USUAL),
    (2400, 0.3, 0.6, 1, 1.0, 3, 2, TIES),
    (1, 1.0, 1.0, 0, 3.0, 2, 2, USUAL),
    (1024, 0.2, 0.3, 4, 0.7, 5, 4, ROUGH),
    (999, 1.0, 0.2, 1, 1.0, 2, 8, ROUGH),
    (515, 0.2, 0.5, 2, 3.0, 2, 7, ROUGH),
    (0, 0.0, 0.5, 0, 3.0, 2, 2, USUAL),
    (31, 0.0, 0.5, 0, 3.0, 2, 2, USUAL),
]


def sketch_layout(
    numel: int, symbol: str, keys: int, hashes: int = 0, room: float = 3.0
) -> SketchLayout:
    """A table of ``hashes`` partitions with ``room`` cells for each key; 0 for the planned one."""
    layout = plan_layout(numel, SYMBOLS[symbol], keys)
    if hashes == 1:
        return replace(layout, hashes=1, partition=layout.groups)
    if hashes:
        cells = max(32, int(room * layout.keys))
        layout = replace(layout, hashes=hashes, partition=-(-cells // hashes))
    return layout


def _sketches(each: int | None) -> Iterator[Trial]:
    for (symbol, grad, residual), rows in _dealt(SKETCH_SIZES, SKETCHES + RARER_SKETCHES, each):
        calls = []
        for numel, room, above, hashes, cells, W, divisor, kind in rows:
            groups = -(-numel // SYMBOLS[symbol].lanes)
            capacity = int(room * groups)
            layout = sketch_layout(numel, symbol, W * capacity, hashes, cells)
            given = Inputs(kind=kind, above=above, destinations=W)
            of_row = encoder_calls(layout, (grad, residual), divisor, W, capacity)
            calls += [(call, given) for call in (*of_row, *sketch_calls(layout))]
        compiled = (symbol, grad, residual) in SKETCHES
        yield Trial.of(_name("sketch", symbol, grad, residual), calls, compiled)


# Columns and lengths of pieces, ranks, divisor.
DENSE: Table = [
    (((0, 64), (64, 4096), (6000, 32)), 3, 3),
    (((5, 33),), 4, 4),
    (((1, 1), (3, 2049), (2100, 7)), 12, 6),
    ((), 2, 2),
    (((16, 2048), (2064, 2064)), 1, 1),
    (((0, 1),), 70, 7),
    (((2, 100), (200, 2)), 9, 8),
    (((8, 24),), 2, 5),
    (((0, 5001),), 17, 16),
]


def dense_layout(wire: torch.dtype, pieces: Iterable[tuple[int, int]]) -> DenseLayout:
    """Pieces one after another in a message, and the stamp after them."""
    found, word = [], 4
    for column, numel in pieces:
        found.append(Piece(column, numel, word))
        word += -(-numel * wire.itemsize // 16) * 4
    return DenseLayout(wire, tuple(found), tail=word)


# spans, block, messages, kind of inputs
EXACT_SIZES: Table = [
    ((2500, 33, 1), 1024, 2, USUAL),
    ((31, 0, 200), 32, 3, ROUGH),
    ((1300,), 256, 4, TIES),
    ((1,), 32, 2, ROUGH),
    ((2049,), 2048, 2, USUAL),
    ((64,) * 9, 64, 1, ROUGH),
    ((), 1024, 1, USUAL),
    ((700, 1500), 512, 4, USUAL),
    ((5, 2048), 2048, 3, TIES),
]


def _exact(each: int | None) -> Iterator[Trial]:
    formats = [(1, BF16), (2, F16), (3, BF16)]
    for (number, dtype), table in _dealt(EXACT_SIZES, formats, each):
        calls = []
        for spans, block, ranks, kind in table:
            layout = ExactLayout(spans=spans, dtype=dtype, block=block)
            given = Inputs(kind=kind, seed=len(calls), small=False)
            calls += [(call, given) for call in exact_calls(layout, ranks)]
        yield Trial.of(_name("exact", dtype, number), calls)


# elements, messages, kind of inputs
EXPONENT_SIZES: Table = [
    (4096, 2, USUAL),
    (9001, 3, ROUGH),
    (4200, 2, TIES),
    (1, 2, ROUGH),
    (64, 4, USUAL),
    (100, 1, TIES),
    (0, 2, USUAL),
    (12288, 1, TIES),
    (8192, 4, ROUGH),
]


def _exponents() -> Iterator[Trial]:
    calls = []
    for numel, ranks, kind in EXPONENT_SIZES:
        given = Inputs(kind=kind, seed=len(calls), small=False)
        calls += [(call, given) for call in exponent_calls(ExponentLayout(numel=numel), ranks)]
    yield Trial.of(_name("exponents", BF16), calls)


def _others() -> Iterator[Trial]:
    for dtype, lead in ((F32, 0.65), (BF16, 0.1), (F16, 1.0)):
        kinds = (USUAL, ROUGH, USUAL, ROUGH, TIES, ROUGH)
        calls = [
            (lag_call(dtype, lead=lead), Inputs(kind=kind, elements=n))
            for n, kind in zip((0, 1, 31, 2048, 5003, 6144), kinds, strict=True)
        ]
        yield Trial.of(_name("lag", dtype), calls)
        calls = [
            (call, Inputs(kind=kind, elements=n))
            for n, kind in zip((0, 1, 7, 4096, 5003, 9001), kinds, strict=True)
            for call in fingerprint_calls(dtype)
        ]
        yield Trial.of(_name("fingerprint", dtype), calls)
        for wire in dict.fromkeys((dtype, BF16)):
            calls = []
            for i, (pieces, ranks, divisor) in enumerate(DENSE):
                layout = dense_layout(wire, pieces)
                of_row = dense_calls(layout, dtype, divisor, stamped=i % 3 < 2, ranks=ranks)
                given = Inputs(kind=(USUAL, TIES, ROUGH)[i // 3], seed=i, small=False)
                calls += [(_in_twos(call, i), given) for call in of_row]
            yield Trial.of(_name("dense", wire, dtype), calls)
            yield Trial.of(_name("merged", wire, dtype), _merged(wire, dtype))
    shapes = ((1, 1), (2, 8), (3, 5), (7, 37), (43, 3), (8, 16))
    for parity in (0, 1):
        steered = [(steer_call(*shape), Inputs(seed=seed)) for shape in shapes for seed in (0, 1)]
        yield Trial.of(f"steer {parity}", steered[parity::2])


def _in_twos(call: Call, i: int) -> Call:
    """In every third row of the table, which has no stamps, a sum makes two rows."""
    lag = dict(call.dtypes).get("sent") is not None  # then there is one row
    two = i % 3 == 2 and call.rows[0] == 1 and len(call.rows) == 2 and not lag
    return replace(call, rows=(2, call.rows[1])) if two else call


def _merged(wire: torch.dtype, dtype: torch.dtype) -> Iterator[tuple[Call, Inputs]]:
    """Pieces as of :data:`DENSE`, beside blocks, and beside matrices. Every fourth row reads
    messages that are added."""
    forms = itertools.cycle((bits, residual) for bits, of, residual in BLOCKS if of == dtype)
    sizes = itertools.cycle(((131, 32), (700, 256), (0, 64), (5000, 4096)))
    for i, (pieces, ranks, divisor) in enumerate(DENSE):
        numel, block = next(sizes)
        bits, residual = next(forms)
        layout = BlockLayout(numel=numel, bits=bits, block=block)
        matrix = MatrixLayout(rows=numel // 700, columns=block + 8, bits=1 + bits // 8)
        matrices = Matrices((matrix, replace(matrix, rows=3, columns=24, count=2)))
        if i == 4:  # more shapes than one launch takes, and stamps that differ
            shapes = ((2, 16), (5, 40), (6, 8), (1, 72))
            others = (replace(matrix, rows=r, columns=c) for r, c in shapes)
            matrices = Matrices((*matrices.runs, *others))
        form = dense_layout(wire, pieces), (dtype, residual), (0.0, 0.9)[i // 2 % 2], divisor
        given = {"stamped": i % 3 < 2, "ranks": ranks}
        for call in (
            *merged_calls(layout, *form, **given),
            *merged_calls(matrices, *form, **given),
        ):
            if call.rows == (ranks, 1) and i % 4 == 0:
                options = dict(call.options) | {"add": True}
                call = replace(call, options=tuple(options.items()))
            yield _in_twos(call, i), Inputs(kind=(USUAL, TIES, ROUGH)[i // 3], seed=i, small=False)


# Sizes of each format where all of them would take long.
SIZES = 3
TILE = 8192
# Elements of shards of several of the CPU's tiles, and of one that goes past its caches (1 MiB).
SHARDS = (TILE - 1, TILE, TILE + 1, 3 * TILE + 5, 2**19 + 77)


def shards(numel: int) -> Trial:
    """Decoders of ``numel`` elements, which cover the ends of tiles and exceed the caches."""
    calls: list[Call] = []
    for bits, block, dtype in ((4, 256, F32), (8, 4096, BF16), (4, 32, F32), (8, 256, F16)):
        layout = BlockLayout(numel=numel, bits=bits, block=block)
        for divisor in (2, 3):
            calls += block_calls(layout, (dtype, None), 0.0, divisor, 2)
    for bits, columns in ((1, 1001), (2, 1024), (1, TILE + 3)):
        layout = MatrixLayout(rows=-(-numel // columns), columns=columns, bits=bits)
        calls += matrix_calls(layout, (BF16 if bits == 2 else F32, None), 0.0, 3, 2)
    for symbol, dtype in (("int8x4", BF16), ("int16x2", F32), ("int32x1", F32)):
        layout = plan_layout(numel, SYMBOLS[symbol], numel // 50)
        calls += encoder_calls(layout, (dtype, None), 2, 2)
    given = Inputs(kind=ROUGH, small=False)
    of_shards = [call for call in calls if "out" in dict(call.dtypes)]
    return Trial.of(f"shards of {numel}", [(call, given) for call in of_shards])


def trials(each: int | None = None) -> list[Trial]:
    """Trials of every format.

    Args:
        each: sizes of every format, so that all formats together have all; default: all for each.
    """
    formats = *_blocks(each), *_matrices(each), *_sketches(each), *_exact(each)
    return [*formats, *_exponents(), *_others()]


def one_of_each() -> list[Case]:
    """A case of every operator, as in the check before training."""
    return [case_of(call) for call in {call.operator: call for call in every_call()}.values()]
