"""Wire format of quantized matrices: scales of rows and of columns, then codes of a few bits.

A block's common scale would give all its elements the same size, and with it the same second
moment, by which Adam divides. Gradients of a linear layer are outer products summed over tokens, so
their sizes follow rows (the output's gradient) and columns (the input). The step of element
``(i, j)`` is ``f_i * v_j``. Divided by it, elements are close to Gaussian in attention and MLP,
less so in embeddings (measured in docs/records/quality.md). Every step computes both:

* ``v_j`` of the column: its sum of magnitudes relative to the largest such sum, in 4 bits, in half
  octaves: 1, 0.75, 0.5, 0.375, ..., 2**-7 * 0.75. Sums are not divided: each is rounded to half
  octaves, and ``v_j`` is as many half octaves below 1 as the column's sum is below the largest.
  That is within a quarter of the quotient, which suffices because the residual keeps the
  quantization error.
* ``f_i`` of the row: a number of 4 significant bits, stored as a byte. Its upper 12 bits as a
  float32 are the byte plus the matrix's ``base``, which follows from the largest column's sum, so
  rows do not depend on each other. ``f_i`` is fitted to the row once ``v`` is known, so that a
  row's residual never has more energy than the row had (with 1 bit, and for levels below 2). With
  the row's root mean square, the residual could grow where one element is much larger than the
  rest.

Every element has a code ``q`` of ``bits`` bits, ``-2**(bits - 1) <= q < 2**(bits - 1)``, that
stands for ``(2 q + 1) * f_i * v_j``. No code stands for zero, and a code of 1 bit is the element's
sign.

With 1 bit, ``f_i`` is the least squares fit of the decoded row to the row, times ``level``. With
more it is the row's mean magnitude in units of ``v``, times ``level``, times a factor that suits a
Gaussian.

Products ``(2 q + 1) * f_i * v_j`` have at most 8 significant bits, so they are exact in float32,
with or without fused multiply-add.

A matrix's message is ``[base | v | f | codes]`` of int32: eight columns per word, the first in the
lowest 4 bits; four rows per word, the first in the lowest byte; each row's codes begin a new word.
A row of ``n`` codes takes ``m = ceil(n * bits / 32)`` words, and its code ``i * m + j`` is in bits
``[bits * i, bits * (i + 1))`` of word ``j``. Neighbours lie in neighbouring words, as in
:mod:`tagc.ops.blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

BITS = (1, 2)
# By bits: half the distance between the values of neighbouring codes, in units of the mean
# magnitude, that minimizes the squared error of a Gaussian. A fit needs no such factor.
_DISTANCE = {1: 1.0, 2: 0.624}
# Larger magnitudes count as this in sums, so that sums stay finite.
LARGEST = 2.0**64
# A column's 4 bits, plus this, are the upper 10 bits of its scale as a float32.
COLUMN_BIAS = 2 * 127 - 15
# A matrix sends nothing if the mean of its largest column has a smaller biased exponent, so that no
# product of scales, and no inverse of a scale, is subnormal.
MIN_EXPONENT = 127 - 60
# The byte of a row whose scale is about the mean of the largest column, to a factor of two. Rows
# may exceed that by 14 octaves, and fall short of it by 16.
CENTRE = 136
# Bytes that are not scales: for rows that send nothing, and for rows with a NaN or an infinity.
NOTHING, NOT_FINITE = 0, 255
# A column is summed in this many lanes: lane l adds up the elements l, l + lanes, ..., in order;
# then neighbouring lanes are added, pair by pair. All implementations keep the order of this sum
# and of a row's sum (MatrixLayout.word_lanes), so that all get the same bits.
COLUMN_LANES = 8
# At least this many columns of a row are added up in a tree; longer rows are chains of trees.
SPAN = 4096  # a power of two


@dataclass(frozen=True, kw_only=True)
class MatrixLayout:
    """Static shape of the message of one matrix, or of several of the same shape.

    Attributes:
        rows, columns: size of the part of the matrix that a shard holds.
        bits: bits of a code, one of ``BITS``.
        level: factor on the values that codes stand for. Above 1, a message carries more of the
            residual, and more noise.
        count: number of matrices of this shape, one after the other in a row of a tensor. Each has
            its own scales and message; messages also follow one another.
    """

    rows: int
    columns: int
    bits: int = 1
    level: float = 1.0
    count: int = 1

    @property
    def one(self) -> Self:
        """The layout of one of the matrices."""
        return replace(self, count=1)

    @property
    def runs(self) -> tuple[Self]:
        """As of :class:`Matrices`, with a single shape."""
        return (self,)

    @cached_property
    def numel(self) -> int:
        """Number of elements of all matrices."""
        return self.count * self.rows * self.columns

    @cached_property
    def row_words(self) -> int:
        """int32 words of a row's codes."""
        return -(-self.columns // self.places)

    @cached_property
    def places(self) -> int:
        """Number of codes in a word, a power of two."""
        return 32 // self.bits

    @cached_property
    def word_lanes(self) -> int:
        """Number of words of a row that are summed side by side.

        The numbers of a row's elements are summed in a table ``[places, word_lanes]``: that of the
        code ``i`` of word ``j`` is added to entry ``[i, j % word_lanes]``, in the order of words;
        missing elements count as 0. Then neighbouring words are added, pair by pair, until each
        place has one number. Then the second half of the places is added to the first, until one
        number is left.
        """
        return SPAN // self.places

    @cached_property
    def words_at_a_time(self) -> int:
        """Number of words of the table in which a row is summed: as many of ``word_lanes`` as a row
        needs, rounded up to a power of two."""
        return min(self.word_lanes, 1 << (self.row_words - 1).bit_length())

    @cached_property
    def head(self) -> tuple[int, int, int]:
        """int32 words of a matrix's base, of its columns' scales and of its rows' scales."""
        return 1, -(-self.columns // 8), -(-self.rows // 4)

    @cached_property
    def words(self) -> int:
        """int32 words of all messages."""
        return self.count * (sum(self.head) + self.rows * self.row_words) if self.rows else 0

    @cached_property
    def distance(self) -> float:
        """Factor on a row's fit."""
        return self.level * _DISTANCE[self.bits]

    @cached_property
    def fitted(self) -> bool:
        """Whether a row's codes stand for values of one size, which is fitted to the row."""
        return self.bits == 1


@dataclass(frozen=True)
class Matrices:
    """Matrices of several shapes, one after the other in a row of a tensor, and so their messages.

    Attributes:
        runs: of each shape in turn the layout; they differ in rows, columns and count only.
    """

    runs: tuple[MatrixLayout, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements of all matrices."""
        return sum(run.numel for run in self.runs)

    @cached_property
    def words(self) -> int:
        """int32 words of all messages."""
        return sum(run.words for run in self.runs)


AnyMatrices = MatrixLayout | Matrices


def parts_of(layout: AnyMatrices) -> Iterator[tuple[MatrixLayout, slice, slice]]:
    """For each matrix its layout, the slice of its elements, and that of its message's words."""
    column = word = 0
    for run in layout.runs:
        one = run.one
        for _ in range(run.count):
            yield one, slice(column, column + one.numel), slice(word, word + one.words)
            column, word = column + one.numel, word + one.words


def shard_shape(shape: tuple[int, ...], dim: int, numel: int) -> tuple[int, int]:
    """Rows and columns of ``numel`` elements of a parameter of this shape that is sharded along
    ``dim``. All dimensions but the first make a row."""
    if not numel:
        return 0, 1
    if dim == 0:
        columns = math.prod(shape[1:])
        return numel // columns, columns
    return shape[0], numel // shape[0]
