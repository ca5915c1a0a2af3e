"""One launch for matrices of several shapes.

Matrices of one shape, one after the other, are a *run*. For each run, a kernel takes as arguments
what is in :class:`OfRun`. (What is read from memory cannot be in uniform registers, so it would
cost every thread registers.) The programs of a launch are numbered from run to run and from matrix
to matrix.

Worked example: 3 programs for each of 2 matrices, then 1 program for each of 4. The runs begin with
the programs 0 and 6, so the program 5 is the last one of the second matrix.

Columns and places of elements are in units of ``UNIT``: then Triton knows that neighbouring
elements are aligned and share a mask.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tagc.ops.matrix import AnyMatrices, MatrixLayout

from .jit import constant, jit, tl

# What a kernel of rows is compiled for, for each run: integers.
Sizes = tuple[int, ...]
# Of a launch: each is compiled apart, in the kernels of rows.
_RUNS = 4


class Before(NamedTuple):
    """How much comes before a run: elements of a row of the tensor, words of its message, columns
    of all matrices, and so on."""

    elements: int = 0
    words: int = 0
    columns: int = 0
    rows: int = 0
    row_words: int = 0


@dataclass(frozen=True)
class Run:
    """Matrices of one shape."""

    layout: MatrixLayout
    before: Before

    @property
    def unit(self) -> int:
        """The largest power of two up to 8, as many as a thread loads at once, that divides the
        columns and the places of elements."""
        return math.gcd(8, self.layout.columns, self.before.elements, self.before.columns)


class OfRun(NamedTuple):
    """What a kernel takes for a run: its first program, the programs of a matrix, sizes, and
    :class:`Before`. They are few numbers, because each takes the host time."""

    first: int
    programs: int
    rows: int
    columns: int
    elements_before: int
    words_before: int
    columns_before: int
    rows_before: int
    row_words_before: int


_FIRST_BEFORE = constant(OfRun._fields.index("elements_before"))


@cache
def runs_of(layout: AnyMatrices) -> tuple[tuple[tuple[Run, ...], ...], Before]:
    """The runs that have elements, as many together as a launch takes, and the sums of all."""
    runs, total = [], Before()
    for m in layout.runs:
        if m.rows:
            runs.append(Run(m, total))
            n = m.count
            more = m.numel, m.words, n * m.columns, n * m.rows, n * m.row_words
            total = Before(*map(operator.add, total, more))
    return tuple(tuple(runs[i : i + _RUNS]) for i in range(0, len(runs), _RUNS)), total


def programs_and_runs(
    runs: Sequence[Run], programs: Callable[[MatrixLayout], int], unit: int = 1, first: int = 0
) -> tuple[int, tuple[OfRun, ...]]:
    """The program after the last one, and a kernel's argument ``runs``, with programs from
    ``first`` on. A matrix has so many ``programs``; ``unit`` is the kernel's ``UNIT``."""
    found = []
    for run in runs:
        m, of_matrix = run.layout, programs(run.layout)
        elements, words, columns, *others = run.before
        before = elements // unit, words, columns // unit, *others
        numbers = first, of_matrix, m.rows, m.columns // unit, *before
        found.append(OfRun(*map(_odd, numbers)))
        first += of_matrix * m.count
    return first, tuple(found)


def programs_and_alike(
    runs: Sequence[Run],
    sizes: Callable[[Run], Sizes],
    programs: Callable[[MatrixLayout, Sizes], int],
) -> tuple[int, tuple[tuple[OfRun, ...], ...], tuple[Sizes, ...]]:
    """As :func:`programs_and_runs`, for a kernel with sizes of its own for each kind of runs: the
    runs of each kind, and the sizes, which have ``UNIT`` first."""
    alike: dict[Sizes, list[Run]] = {}
    for run in runs:
        alike.setdefault(sizes(run), []).append(run)
    first, found = 0, []
    for its, some in alike.items():
        first, numbers = programs_and_runs(some, lambda m, its=its: programs(m, its), its[0], first)
        found.append(numbers)
    return first, tuple(found), tuple(alike)


def _odd(number: int) -> int:
    """Triton compiles a kernel anew if a number in a tuple becomes 1 or a multiple of 16."""
    return 2 * number + 3


@jit
def numbers_of(run):
    """What became odd numbers in :func:`programs_and_runs`."""
    numbers = ()
    for i in tl.static_range(len(run)):
        number = (run[i] >> 1) - 1
        if i >= _FIRST_BEFORE:
            number = number.to(tl.int64)
        numbers += (number,)
    return OfRun(*numbers)


@jit
def whose_matrix(runs):
    """A program's run; its matrix in the run, int64; and the program's number in the matrix."""
    program = tl.program_id(0)
    run = numbers_of(runs[0])
    for i in tl.static_range(1, len(runs)):
        its = numbers_of(runs[i])
        if program >= its.first:
            run = its
    number = program - run.first
    return run, (number // run.programs).to(tl.int64), number % run.programs


@jit
def is_of_kind(runs, KIND: tl.constexpr):
    """Whether a program belongs to runs of a kind, see :func:`programs_and_alike`."""
    is_one = tl.program_id(0) >= numbers_of(runs[KIND][0]).first
    if len(runs) > KIND + 1:
        is_one &= tl.program_id(0) < numbers_of(runs[KIND + 1][0]).first
    return is_one


@jit
def first_element(run, m, columns, UNIT: tl.constexpr):
    """Of the matrix ``m`` in a row of the tensor."""
    return run.elements_before * UNIT + m * run.rows * columns


@jit
def first_word(run, m, columns, row_words):
    """Of the matrix ``m`` in a message."""
    _, before_codes = head_words(run.rows, columns)
    return run.words_before + m * (before_codes + run.rows.to(tl.int64) * row_words)


@jit
def first_column(run, m, columns, UNIT: tl.constexpr):
    """Of the matrix ``m`` among the columns of all matrices."""
    return run.columns_before * UNIT + m * columns


@jit
def first_row(run, m, r, R):
    """Of the matrix ``m`` in the message ``r`` of ``R``, among the rows of all messages."""
    return run.rows_before * R + (m * R + r) * run.rows


@jit
def first_row_word(run, m, r, R, row_words):
    """As :func:`first_row`, if every matrix had only the words of one row's codes."""
    return run.row_words_before * R + (m * R + r) * row_words


@jit
def words_of_row(columns, PLACES: tl.constexpr, OF_WORDS: tl.constexpr):
    """Words of a row's codes, of which Triton then knows that they are a multiple of
    ``OF_WORDS``."""
    return (columns + (PLACES - 1)) // (PLACES * OF_WORDS) * OF_WORDS


@jit
def head_words(rows, columns):
    """Words of a message before the scales of rows, and before the codes."""
    before = 1 + (columns + 7) // 8
    return before, before + (rows + 3) // 4
