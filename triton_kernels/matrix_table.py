"""Tables of matrices: one launch for matrices of several shapes.

A table on the device has a row for each run of matrices of one shape. The programs of a launch are
numbered from run to run and from matrix to matrix. Each finds its run by its number, and the place
of its matrix in tensors, message and scratch from the run's.

Worked example: 3 programs for each of 2 matrices, then 1 program for each of 4. Their rows begin
with the programs 0 and 6, so the program 5 is the last one of the second matrix.

Columns and places of elements stand in the table in units of ``UNIT``: then Triton knows that
neighbouring elements are aligned and share a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tagc.ops.matrix import AnyMatrices, MatrixLayout

from .jit import constant, jit, tl

# Where a row of the table has what.
_FIRST, _PROGRAMS, _ROWS, _COLUMNS = constant(0), constant(1), constant(2), constant(3)
_ROW_WORDS, _WORDS, _ELEMENTS_BEFORE = constant(4), constant(5), constant(6)
_WORDS_BEFORE, _COLUMNS_BEFORE, _MATRICES_BEFORE = constant(7), constant(8), constant(9)
_ROWS_BEFORE, _ROW_WORDS_BEFORE, _LOG_OF_ROWS = constant(10), constant(11), constant(12)
_FIELDS = constant(13)


@dataclass(frozen=True)
class Before:
    """How much comes before a run: elements of a row of the tensor, words of its message, columns
    of all matrices, and so on."""

    elements: int = 0
    words: int = 0
    columns: int = 0
    matrices: int = 0
    rows: int = 0
    row_words: int = 0


@dataclass(frozen=True)
class Run:
    """Matrices of one shape."""

    layout: MatrixLayout
    before: Before

    @property
    def elements(self) -> slice:
        return slice(self.before.elements, self.before.elements + self.layout.numel)

    @property
    def words(self) -> slice:
        return slice(self.before.words, self.before.words + self.layout.words)

    @property
    def columns(self) -> slice:
        return slice(
            self.before.columns, self.before.columns + self.layout.count * self.layout.columns
        )

    @property
    def matrices(self) -> slice:
        return slice(self.before.matrices, self.before.matrices + self.layout.count)

    @property
    def unit(self) -> int:
        """The largest power of two up to 8, as many as a thread loads at once, that divides the
        columns and the places of elements."""
        return math.gcd(8, self.layout.columns, self.before.elements, self.before.columns)


@cache
def runs_of(layout: AnyMatrices) -> tuple[tuple[Run, ...], Before]:
    """The runs that have elements, and the sums of all."""
    runs, total = [], Before()
    for m in layout.runs:
        if m.rows:
            runs.append(Run(m, total))
            n = m.count
            more = m.numel, m.words, n * m.columns, n, n * m.rows, n * m.row_words
            total = Before(*(a + b for a, b in zip(astuple(total), more, strict=True)))
    return tuple(runs), total


def programs_and_table(
    runs: Sequence[Run], programs: Callable[[MatrixLayout], int], unit: int, device: torch.device
) -> tuple[int, dict[str, Any]]:
    """Number of programs, and a kernel's arguments ``table`` and ``runs``.

    Args:
        programs: how many of them a matrix has.
        unit: the kernel's ``UNIT``.
    """
    of_matrices = tuple(programs(run.layout) for run in runs)
    total = sum(n * run.layout.count for n, run in zip(of_matrices, runs, strict=True))
    return total, {"table": _table(tuple(runs), of_matrices, unit, device), "runs": len(runs)}


@cache
def _table(
    runs: tuple[Run, ...], programs: tuple[int, ...], unit: int, device: torch.device
) -> Tensor:
    rows, first = [], 0
    for run, of_matrix in zip(runs, programs, strict=True):
        m, before = run.layout, run.before
        elements, words, columns, *others = astuple(before)
        shape = m.rows, m.columns // unit, m.row_words, m.one.words
        places = elements // unit, words, columns // unit, *others
        rows.append((first, of_matrix, *shape, *places, m.rows.bit_length() - 1))
        first += of_matrix * m.count
    # Training cannot use a tensor that an evaluation made in inference mode.
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=torch.int64, device=device)


@jit
def whose_matrix(table, runs):
    """The table's row about a program's run; its matrix in the run, int64; and the program's number
    in the matrix."""
    program = tl.program_id(0)
    row = tl.zeros([], tl.int32)
    for i in range(1, runs):
        row += (tl.load(table + i * _FIELDS) <= program).to(tl.int32)
    table += row * _FIELDS
    number = program - tl.load(table + _FIRST).to(tl.int32)
    programs = tl.load(table + _PROGRAMS).to(tl.int32)
    return table, (number // programs).to(tl.int64), number % programs


@jit
def shape_of(table, UNIT: tl.constexpr):
    """Rows, columns, and words of a row's codes."""
    return (
        tl.load(table + _ROWS).to(tl.int32),
        (tl.load(table + _COLUMNS) * UNIT).to(tl.int32),
        tl.load(table + _ROW_WORDS).to(tl.int32),
    )


@jit
def log_of_rows(table):
    """Rounded down."""
    return tl.load(table + _LOG_OF_ROWS).to(tl.int32)


@jit
def first_element(table, m, rows, columns, UNIT: tl.constexpr):
    """Of the matrix ``m`` in a row of the tensor."""
    return tl.load(table + _ELEMENTS_BEFORE) * UNIT + m * rows * columns


@jit
def first_word(table, m):
    """Of the matrix ``m`` in a message."""
    return tl.load(table + _WORDS_BEFORE) + m * tl.load(table + _WORDS)


@jit
def first_column(table, m, columns, UNIT: tl.constexpr):
    """Of the matrix ``m`` among the columns of all matrices."""
    return tl.load(table + _COLUMNS_BEFORE) * UNIT + m * columns


@jit
def first_top(table, m, columns, UNIT: tl.constexpr, TILE: tl.constexpr):
    """Place for the first ``TILE`` columns of the matrix ``m`` among those of all matrices, some of
    which stay empty."""
    return first_column(table, m, columns, UNIT) // TILE + number_of(table, m)


@jit
def number_of(table, m):
    """Of the matrix ``m`` among all matrices."""
    return tl.load(table + _MATRICES_BEFORE) + m


@jit
def first_row(table, m, r, R, rows):
    """Of the matrix ``m`` in the message ``r`` of ``R``, among the rows of all messages."""
    return tl.load(table + _ROWS_BEFORE) * R + (m * R + r) * rows


@jit
def first_row_word(table, m, r, R, row_words):
    """As :func:`first_row`, if every matrix had only the words of one row's codes."""
    return tl.load(table + _ROW_WORDS_BEFORE) * R + (m * R + r) * row_words


@jit
def head_words(rows, columns):
    """Words of a message before the scales of rows, and before the codes."""
    before = 1 + (columns + 7) // 8
    return before, before + (rows + 3) // 4
