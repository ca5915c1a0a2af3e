"""Numbers of quantized matrices: sums in lanes, scales and their inverses.

:mod:`tagc.ops.matrix` has the format. Everything is integer or correctly rounded, and every float
sum has the format's order: the caller adds to lanes, or to a row's table, front to back;
:func:`pairs` adds up lanes, :func:`sum_table` a row's table. Sums have no negative terms, so adding
zeros for missing terms changes no bit.

A column's scale is ``1.5**o * 2**k`` with ``o`` 0 or 1, so its inverse is ``2**-k`` or the float32
next to 2/3, times ``2**-k``: integer arithmetic on the exponent instead of a division.

Worked example: sums 8 and 3.1 have the upper 10 bits 260 and 257 (3.1 rounds to 3), so the codes 15
and 12, which are the scales 1 and 0.375 with the inverses 1 and 2.6666667.
"""

from __future__ import annotations

from tagc.ops.matrix import COLUMN_BIAS, LARGEST

from .jit import constant, jit, tl
from .scalar import magnitude, widen

_TOP = constant(15)
_BIAS = constant(COLUMN_BIAS)
INFINITY = constant(0x7F800000)
# The bits of ``LARGEST``.
LARGEST_BITS = constant((127 << 23) + ((int(LARGEST).bit_length() - 1) << 23))
# The sum of the exponents of a scale and its inverse; and 1.5 minus the float32 next to 4/3.
_BOTH, _LESS = constant(254 << 23), constant((1 << 22) - 0x2AAAAB)
_CHUNK = constant(64)


def unit_of(count: int) -> int:
    """The largest power of two up to 16 that divides ``count``. Kernels get ``count`` in these
    units, so that Triton knows which accesses are aligned."""
    return min(16, count & -count)


@jit
def load_x(grad, residual, at, inside):
    """float32 sum of gradient and residual, 0 where masked off."""
    x = widen(tl.load(grad + at, mask=inside, other=0.0))
    if residual is not None:
        x += widen(tl.load(residual + at, mask=inside, other=0.0))
    return x


@jit
def bounded(x):
    """Magnitude, at most ``LARGEST``, and 0 where ``x`` is not finite."""
    b = magnitude(x)
    b = tl.where(b < INFINITY, tl.minimum(b, LARGEST_BITS), 0)
    return b.to(tl.float32, bitcast=True)


@jit
def pairs(total, LOG: tl.constexpr):
    """Add up ``[N, 2**LOG]`` lanes, neighbours first: ``[N]``."""
    for _ in tl.static_range(LOG):
        # The sum of two numbers does not depend on their order.
        total = tl.sum(tl.reshape(total, [total.shape[0], total.shape[1] // 2, 2]), 2)
    return tl.reshape(total, [total.shape[0]])


@jit
def largest_of(pointer, count):
    """The largest of ``count`` int32, at least 0."""
    k = tl.arange(0, _CHUNK)
    best = tl.zeros([_CHUNK], tl.int32)
    for first in range(0, count, _CHUNK):
        best = tl.maximum(best, tl.load(pointer + first + k, mask=k < count - first, other=0))
    return tl.max(best, 0)


@jit
def column_upper(total):
    """The upper 10 bits of columns' sums, rounded."""
    return (total.to(tl.int32, bitcast=True) + (1 << 21)) >> 22


@jit
def column_code(total, top):
    """4-bit codes of columns with these sums; the largest sum has the upper bits ``top``."""
    return tl.maximum(column_upper(total) - top + _TOP, 0)


@jit
def upper_of(code):
    """The upper 10 bits of ``v``; its other bits are 0."""
    return code + _BIAS


@jit
def scale_of(upper):
    """``v``, float32."""
    return (upper << 22).to(tl.float32, bitcast=True)


@jit
def inverse_of(upper):
    """``1 / v``, rounded to nearest even as by a division."""
    bits = -(upper << 22) - (upper & 1) * _LESS + _BOTH
    return bits.to(tl.float32, bitcast=True)


@jit
def sum_table(table, LOG_PLACES: tl.constexpr, LOG_WORDS: tl.constexpr):
    """Sums ``[ROWS]`` of rows' tables ``[ROWS, 2**LOG_PLACES, 2**LOG_WORDS]``; see
    :attr:`tagc.ops.matrix.MatrixLayout.word_lanes`."""
    places = tl.reshape(table, [table.shape[0] * table.shape[1], table.shape[2]])
    total = tl.reshape(pairs(places, LOG_WORDS), [table.shape[0], table.shape[1]])
    for _ in tl.static_range(LOG_PLACES):
        total = tl.sum(tl.reshape(total, [total.shape[0], 2, total.shape[1] // 2]), 1)
    return tl.reshape(total, [total.shape[0]])


@jit
def row_scale(byte, base):
    """``f``, float32, from bytes that are scales."""
    return ((byte + base) << 20).to(tl.float32, bitcast=True)
