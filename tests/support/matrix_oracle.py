"""The contract of the operators of codec `matrix`, in numpy scalars, for small inputs.

The format's numbers are written out here, so a mistake in `tagc.ops.matrix` shows, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from support import oracle

F = np.float32
DISTANCES = {1: 1.0, 2: 0.624}
WIDTHS = {8: 4}


@dataclass
class Quantized:
    """A matrix quantized for one destination.

    Attributes:
        words: the message.
        said: the decoded values, NaN in rows that are not finite, `[rows, columns]` float64.
        spoken: places that have a code.
        left: the values minus the decoded ones, float32.
        bad: rows that are not finite, `[rows]`.
    """

    words: list[int]
    said: np.ndarray
    spoken: np.ndarray
    left: np.ndarray
    bad: np.ndarray


def lane_sum(values: np.ndarray, lanes: int) -> np.float32:
    """Lane `l` adds elements `l`, `l + lanes`, ...; then neighbouring lanes, pair by pair."""
    totals = [F(0)] * lanes
    for i, value in enumerate(values):
        totals[i % lanes] = F(totals[i % lanes] + value)
    while len(totals) > 1:
        totals = [F(a + b) for a, b in zip(totals[::2], totals[1::2], strict=True)]
    return totals[0]


def code_sum(values: np.ndarray, width: int, group: int) -> np.float32:
    """Sum the decoded values of a row. Code `i` of word `j` has place `[i, j]` of a table, at most
    as wide as 4096 columns need. First neighbouring words are added, then halves of places."""
    lanes = 32 // width
    words, wide = -(-len(values) // lanes), 4096 // (lanes * group)
    table = [F(0)] * (lanes * wide)
    for k, value in enumerate(values):
        at = k // words * wide + k % words % wide
        table[at] = F(table[at] + value)
    for _ in range(int(math.log2(wide))):
        table = [F(a + b) for a, b in zip(table[::2], table[1::2], strict=True)]
    while len(table) > 1:
        half = len(table) // 2
        table = [F(a + b) for a, b in zip(table[:half], table[half:], strict=True)]
    return table[0]


def bits_of(value: np.float32) -> int:
    return int(F(value).view(np.uint32))


def float_of(bits: int) -> np.float32:
    return np.uint32(bits).view(F)


def digits(values: list[int], width: int) -> list[int]:
    """Pack neighbours into a word, the first in its lowest bits."""
    lanes = 32 // width
    return [
        sum(v << width * i for i, v in enumerate(values[at : at + lanes]))
        for at in range(0, len(values), lanes)
    ]


def uppers(u: np.ndarray) -> list[int]:
    """The upper 10 bits of the columns' sums, rounded."""
    return [(bits_of(lane_sum(column, 8)) + 2**21) >> 22 for column in u.T]


def column_codes(u: np.ndarray) -> list[int]:
    rounded = uppers(u)
    return [max(0, t - max(rounded) + 15) for t in rounded]


def column_scale(code: int) -> np.float32:
    """1, 0.75, 0.5, 0.375, ... for 15, 14, 13, 12, ..."""
    octaves, half = divmod(15 - code, 2)
    return F(2.0**-octaves * (0.75 if half else 1.0))


def quantize(x: np.ndarray, layout: Any) -> Quantized:
    """Contract of `MatrixOps.quantize_matrix` from float32 `x` `[rows, columns]`, up to the
    residual."""
    rows, columns = x.shape
    bits, group = layout.bits, layout.group
    finite = np.isfinite(x)
    u = np.where(finite, np.minimum(np.abs(x), F(2.0**64)), F(0)).astype(F)
    good = np.array([bool(row.all()) for row in finite])
    codes_of_columns = column_codes(u)
    v = np.array([column_scale(code) for code in codes_of_columns], F)
    exponent = (max(uppers(u)) >> 1) - int(math.log2(rows))
    base = 0 if exponent < 67 else 8 * exponent - 136
    distance = F(layout.level * DISTANCES[bits])
    bytes_of_rows, codes = [], []
    said, spoken = np.zeros(x.shape, np.float64), np.zeros(x.shape, bool)
    left = x.copy()
    for i in range(rows):
        row: list[int] = [0] * -(-columns // group)
        byte = 255
        if good[i]:
            at = largest_of(x[i], v, group)
            stands, norm = (u[i] * v, v * v) if bits == 1 else (u[i], v)
            width = WIDTHS.get(group, bits)
            fit = code_sum(stands[at], width, group) / code_sum(norm[at], width, group)
            byte = min(254, ((bits_of(F(F(fit) * distance)) + 2**19) >> 20) - base)
            if byte < 1 or base == 0:
                byte = 0
        if 0 < byte < 255:
            f = float_of((byte + base) << 20)
            spoken[i, at] = True
            for k, j in enumerate(at):
                value, row[k] = element(x[i, j], f, v[j], j, layout)
                said[i, j] = float(value) * float(f) * float(v[j])
                assert float(F(said[i, j])) == said[i, j]
                left[i, j] = F(x[i, j] - F(said[i, j]))
        if byte == 255:
            said[i] = np.nan
        bytes_of_rows.append(byte)
        codes += strided(row, WIDTHS.get(group, bits))
    words = [base, *digits(codes_of_columns, 4), *digits(bytes_of_rows, 8), *codes]
    return Quantized([oracle.signed(w, 32) for w in words], said, spoken, left, ~good)


def largest_of(x: np.ndarray, v: np.ndarray, group: int) -> list[int]:
    """The elements that have codes: all, or of each group the first of the largest."""
    with np.errstate(over="ignore"):
        size = np.abs(x * (F(1) / v))
    assert size.dtype == F
    starts = range(0, len(x), group)
    return [max(range(s, min(len(x), s + group)), key=lambda j: (size[j], -j)) for s in starts]


def element(x: np.float32, f: np.float32, v: np.float32, j: int, layout: Any) -> tuple[int, int]:
    """The factor of `f * v` that an element's code stands for, and the code."""
    if layout.group > 1:
        negative = bool(np.signbit(x))
        return -1 if negative else 1, j % layout.group + layout.group * negative
    half = 2 ** (layout.bits - 1)
    y = F(F(F(x * F(F(1) / f)) * F(F(1) / v)) * F(0.5))
    q = int(min(max(np.floor(y), -half), half - 1))
    return 2 * q + 1, q % 2**layout.bits


def strided(codes: list[int], width: int) -> list[int]:
    """A row's codes: number `i * m + j` in place `i` of word `j` of `m`."""
    m = -(-len(codes) // (32 // width))
    words = [0] * m
    for k, code in enumerate(codes):
        words[k % m] |= code << width * (k // m)
    return words
