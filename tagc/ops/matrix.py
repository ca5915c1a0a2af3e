"""Wire format of quantized matrices: scales of rows and of columns, then codes of a few bits.

A block's common scale gives all its elements the same size, and with it the same second moment,
by which Adam divides. Gradients of a linear layer are outer products summed over tokens, so their
sizes follow rows (the output's gradient) and columns (the input): the step of element ``(i, j)``
is ``f_i * v_j``, and what is left after dividing by it is close to Gaussian in attention and MLP,
less so in embeddings (docs/quality.md has the measurements). Both are found anew in every step:

* ``v_j``, of the column: its sum of magnitudes relative to the largest such sum, in 4 bits, half
  octaves: 1, 0.75, 0.5, 0.375, ..., 2**-7 * 0.75. No sum is divided by another: each is rounded to
  half octaves, and ``v_j`` is as many of them below 1 as the column's sum is below the largest.
  That is within a quarter of the quotient, which is near enough, as the residual keeps what the
  codes do not say;
* ``f_i``, of the row, a number of 4 significant bits, kept as a byte: its upper 12 bits as a
  float32 are the byte plus a ``base`` that the matrix has, which follows from the largest column's
  sum: so a row needs no other row's. It is fitted to the row once ``v`` is
  known, so that a row's residual never has more energy than the row had (where all codes have the
  same size, and for levels below 2). If it were the row's root mean square, the residual could
  grow where one element is much larger than the rest.

Every element has a code ``q`` of ``bits`` bits, ``-2**(bits - 1) <= q < 2**(bits - 1)``, that
stands for ``(2 q + 1) * f_i * v_j``: no code stands for zero, and a code of 1 bit is the element's
sign. With a ``group``, that many neighbours in a row share one code. It says which of them is the
largest in units of its ``v``, and the sign of that one, which counts as ``f_i * v_j`` with this
sign; the others count as 0.

Where all codes have the same size (1 bit, or a group), ``f_i`` is the least squares fit of what
they stand for to the row, times ``level``. Otherwise it is the row's mean magnitude in units of
``v``, times ``level``, times a factor that suits a Gaussian.

Products ``(2 q + 1) * f_i * v_j`` have at most 8 significant bits, so they are exact in float32,
with or without fused multiply-add.

A matrix's message is ``[base | v | f | codes]`` of int32: eight columns a word, the first in the
lowest 4 bits; four rows a word, the first in the lowest byte; each row's codes in words of their
own. A row of ``n`` codes of ``w`` bits takes ``m = ceil(n * w / 32)`` words, and its code
``i * m + j`` is in bits ``[w * i, w * (i + 1))`` of word ``j``: neighbours lie in neighbouring
words, as in :mod:`tagc.ops.blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

BITS = (1, 2)
# Neighbours that may share a code, and its bits: which of them is meant, and its sign.
GROUP, GROUP_WIDTH = 8, 4
# By bits: half the distance between the values that neighbouring codes stand for, in units of the
# mean magnitude, that leaves a Gaussian the least squared error. A fit needs no such factor.
_DISTANCE = {1: 1.0, 2: 0.624}
# Larger magnitudes count as this in the sums, so that those stay finite.
LARGEST = 2.0**64
# A column's 4 bits, plus this, are the upper 10 bits of its scale as a float32.
COLUMN_BIAS = 2 * 127 - 15
# Matrices whose largest column has a mean with a smaller biased exponent send nothing, so that no
# product of scales and no inverse of one is subnormal.
MIN_EXPONENT = 127 - 60
# The byte of a row whose scale is about the mean of the largest column, to a factor of two: rows
# may exceed that by 14 octaves, and fall short of it by 16.
CENTRE = 136
# Bytes that are no scales: of rows that send nothing, and of rows with a NaN or an infinity.
NOTHING, NOT_FINITE = 0, 255
# A column is summed in so many lanes: lane l adds up the elements l, l + lanes, ..., in their
# order; then neighbouring lanes are added, pair by pair. All implementations keep to the order of
# this sum and of a row's (MatrixLayout.word_lanes), so that all get the same bits.
COLUMN_LANES = 8
# Columns of a row that are added up in a tree, at least, before there is a chain of such.
SPAN = 4096  # a power of two


@dataclass(frozen=True, kw_only=True)
class MatrixLayout:
    """Static shape of the message of one matrix, or of several of the same shape.

    Attributes:
        rows, columns: of the part of the matrix that a shard holds.
        bits: of a code, where every element has one.
        group: neighbours that share a code, ``GROUP``; 1 for none.
        level: factor on the values that codes stand for; above 1, a message carries more of the
            residual, and more noise.
        count: matrices of this shape, one after the other in a row of a tensor. Each has scales and
            a message of its own; messages follow one another, too.
    """

    rows: int
    columns: int
    bits: int = 1
    group: int = 1
    level: float = 1.0
    count: int = 1

    def __post_init__(self) -> None:
        if self.rows < 0 or self.columns < 1:
            raise ValueError(f"a matrix has columns, got {self.rows} x {self.columns}")
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}")
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {BITS}, got {self.bits}")
        if self.group not in (1, GROUP):
            raise ValueError(f"group must be 1 or {GROUP}, got {self.group}")
        if self.group > 1 and self.bits > 1:
            raise ValueError(f"with a group of {self.group}, bits must be 1, got {self.bits}")
        if not 0.25 <= self.level < 4:
            raise ValueError(f"level must be in [0.25, 4), got {self.level}")

    @property
    def one(self) -> Self:
        """The layout of one of them."""
        return replace(self, count=1)

    @property
    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Of each of the matrices the elements and the words of the message."""
        numel, words = self.one.numel, self.one.words
        for i in range(self.count):
            yield slice(i * numel, (i + 1) * numel), slice(i * words, (i + 1) * words)

    @cached_property
    def numel(self) -> int:
        """Elements of all of them."""
        return self.count * self.rows * self.columns

    @cached_property
    def width(self) -> int:
        """Bits of a code."""
        return self.bits if self.group == 1 else GROUP_WIDTH

    @cached_property
    def codes(self) -> int:
        """Codes of a row."""
        return -(-self.columns // self.group)

    @cached_property
    def row_words(self) -> int:
        """int32 words of a row's codes."""
        return -(-self.codes // self.places)

    @cached_property
    def places(self) -> int:
        """Codes of a word, a power of two."""
        return 32 // self.width

    @cached_property
    def word_lanes(self) -> int:
        """Words of a row that are added to side by side.

        What a row's codes stand for is summed as a table ``[places, word_lanes]``: what code ``i``
        of word ``j`` stands for is added to place ``[i, j % word_lanes]``, words in their order;
        what is not there counts as 0. Then neighbouring words are added, pair by pair, until a
        place has one number left; and the second half of the places to the first, until there is
        one.
        """
        return SPAN // (self.places * self.group)

    @cached_property
    def head(self) -> tuple[int, int, int]:
        """int32 words of a matrix's base, of its columns' scales and of its rows'."""
        return 1, -(-self.columns // 8), -(-self.rows // 4)

    @cached_property
    def words(self) -> int:
        """int32 words of all messages."""
        return self.count * (sum(self.head) + self.rows * self.row_words) if self.rows else 0

    @cached_property
    def distance(self) -> float:
        """What the row's fit is multiplied by."""
        return self.level * _DISTANCE[self.bits]

    @cached_property
    def fitted(self) -> bool:
        """Whether all codes stand for values of one size, which is fitted to each row."""
        return self.bits == 1


def shard_shape(shape: tuple[int, ...], dim: int, numel: int) -> tuple[int, int]:
    """Rows and columns of ``numel`` elements of a parameter of this shape, which is sharded along
    ``dim``: all dimensions but the first make a row."""
    if not numel:
        return 0, 1
    if dim == 0:
        columns = math.prod(shape[1:])
        return numel // columns, columns
    return shape[0], numel // shape[0]


class MatrixOps(Protocol):
    """Tensors are preallocated; outputs may hold garbage before. Rows need unit stride only in
    their last dimension; messages may be slices of wider buffers."""

    def quantize_matrix(
        self,
        grad: Tensor,
        residual: Tensor | None,
        message: Tensor,
        *,
        layout: MatrixLayout,
        average: float,
    ) -> None:
        """Accumulate and quantize matrices for each destination, and keep in the residual what the
        codes do not say.

        Per destination and matrix, all in float32, of ``x = float32(grad) + float32(residual)``,
        and ``u``, the magnitude of ``x``, at most ``LARGEST``, or 0 where it is not finite:

        1. the sum of ``u`` over each column, in ``COLUMN_LANES`` lanes;
        2. with ``t`` the float32 bits of a column's sum plus 2**21, shifted right by 22, the
           column's 4 bits are ``t - max(t) + 15``, at least 0;
        3. ``a``, about the biased exponent of an element's mean magnitude in units of ``v``, is
           ``max(t)`` shifted right by 1, minus the logarithm of the rows, rounded down. The base is
           ``8 * a - CENTRE`` (finite elements of rows that are not finite count in it); 0 if ``a``
           is below ``MIN_EXPONENT``, and then all rows that are finite say ``NOTHING``;
        4. what codes stand for: all elements, or of each group the first with the largest
           ``|x * (1 / v)|`` (which rounds twice; the last group of a row may be short);
        5. the row's scale: where ``fitted``, the sum over codes of ``u * v``, divided by that of
           ``v * v``; else that of ``u`` divided by that of ``v``; see
           :attr:`MatrixLayout.word_lanes`. Times ``float32(distance)``, and with ``t`` the bits
           of that plus 2**19, shifted right by 20, the row's byte is ``t - base``, at most 254, and
           ``NOTHING`` if that is below 1. ``NOT_FINITE`` if the row has an element that is not
           finite. What is ``NOTHING`` or ``NOT_FINITE`` has the codes 0;
        6. codes are ``floor(y * 0.5)``, clipped, with ``y = (x * (1 / f)) * (1 / v)``, which
           rounds four times; with a group the place in it, and ``group`` more where ``x`` there
           has its sign bit set;
        7. ``left = x - (2 q + 1) * f * v``, or ``x`` minus or plus ``f * v`` where a code points,
           rounded once; becomes the residual as in
           :meth:`tagc.ops.blocks.BlockOps.quantize`. Rows that are not finite keep theirs.

        Args:
            grad: ``[D, count * rows * columns]`` float32, bfloat16 or float16.
            residual: ``[D, count * rows * columns]`` float32 or bfloat16, updated in place; None
                for no feedback.
            message: ``[D, words]`` int32, written; padding is 0.
            average: share of the old residual that stays, in [0, 1); LoCo's beta.
        """
        ...

    def dequantize_matrix(
        self, message: Tensor, out: Tensor, *, layout: MatrixLayout, divisor: int
    ) -> None:
        """Add up messages: ``out[k] = (sum over r of what message k, r says) / divisor``.

        Terms are exact in float32; they are added in the order of ``r``, starting from the first,
        then divided (IEEE), then rounded to ``out``'s dtype. What no group's code points at, and
        rows that say nothing, are +0. Rows that are not finite are NaN.

        Args:
            message: ``[K, R, words]`` int32.
            out: ``[K, count * rows * columns]`` float32, bfloat16 or float16, written.
        """
        ...

    def prepare_matrix(
        self,
        layout: MatrixLayout,
        gradient: torch.dtype,
        residual: torch.dtype | None,
        average: float,
    ) -> None:
        """Compile what :meth:`quantize_matrix` and :meth:`dequantize_matrix` will need."""
        ...
