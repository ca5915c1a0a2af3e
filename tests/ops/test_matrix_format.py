"""Messages of matrices: sizes of the layouts, and messages written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from support import oracle
from support.matrix_cases import (
    both,
    dequantize,
)
from tagc.ops.matrix import MatrixLayout, shard_shape


def test_words_of_a_layout():
    layout = MatrixLayout(rows=5, columns=70, bits=2)
    assert (layout.numel, layout.width, layout.codes, layout.row_words) == (350, 2, 70, 5)
    assert layout.head == (1, 9, 2)
    assert layout.words == 1 + 9 + 2 + 5 * 5
    grouped = MatrixLayout(rows=5, columns=70, group=8)
    # Eight codes of 4 bits in a word; nine groups in a row, the last of 6 elements.
    assert (grouped.width, grouped.codes, grouped.row_words) == (4, 9, 2)
    assert MatrixLayout(rows=0, columns=5).words == 0
    several = MatrixLayout(rows=5, columns=70, bits=2, count=3)
    assert (several.numel, several.words, several.one) == (3 * 350, 3 * 37, layout)
    assert [*several.parts][1:] == [
        (slice(350, 700), slice(37, 74)),
        (slice(700, 1050), slice(74, 111)),
    ]


@pytest.mark.parametrize(
    ("bits", "group", "per_element"),
    [(2, 1, 2), (1, 1, 1), (1, 8, 1 / 2)],
)
def test_bits_per_element_of_large_matrices(bits, group, per_element):
    """Scales are little beside codes."""
    layout = MatrixLayout(rows=4096, columns=15 * 1024, bits=bits, group=group)
    assert 32 * layout.words / layout.numel == pytest.approx(per_element, abs=0.002)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": -1, "columns": 1}, "a matrix has columns, got -1 x 1"),
        ({"rows": 1, "columns": 0}, "a matrix has columns, got 1 x 0"),
        ({"rows": 1, "columns": 1, "count": 0}, "count must be at least 1, got 0"),
        ({"rows": 1, "columns": 1, "bits": 3}, r"bits must be one of \(1, 2\), got 3"),
        ({"rows": 1, "columns": 1, "group": 4}, "group must be 1 or 8, got 4"),
        ({"rows": 1, "columns": 1, "group": 8, "bits": 2}, "a group of 8, bits must be 1, got 2"),
        ({"rows": 1, "columns": 1, "level": 4.0}, r"in \[0.25, 4\), got 4.0"),
        ({"rows": 1, "columns": 1, "level": math.nan}, r"in \[0.25, 4\), got nan"),
    ],
)
def test_layouts_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        MatrixLayout(**arguments)


def test_rows_and_columns_of_a_shard():
    assert shard_shape((7, 5), 0, 4 * 5) == (4, 5)
    assert shard_shape((7, 6), 1, 7 * 3) == (7, 3)
    assert shard_shape((7, 3, 2), 0, 4 * 6) == (4, 6)
    assert shard_shape((7, 4, 2), 1, 7 * 2 * 2) == (7, 4)
    assert shard_shape((7, 4, 2), 2, 7 * 4) == (7, 4)
    for shape, dim in itertools.product(((0, 5), (5, 0)), (0, 1)):
        rows, columns = shard_shape(shape, dim, 0)
        assert rows * columns == 0
        assert columns


@both
def test_a_message_written_out(ops):
    """Of three rows and three columns, whose sums are 8, 6 and 0: scales 1, 0.75 and 2**-7 * 0.75.

    The largest sum has the biased exponent 130, and three rows are 2, rounded down, to the power
    of 1. Bits of 4.0, the upper 12 of them, are 0x408 = 1032.
    """
    layout = MatrixLayout(rows=3, columns=3)
    grad = torch.tensor([[4.0, -3, 0, -4, 3, 0, 0, 0, 0]])
    message = oracle.widened(oracle.poisoned(1, layout.words, dtype=torch.int32))
    ops.quantize_matrix(grad, None, message, layout=layout, average=0.0)
    base = 8 * (130 - 1) - 136
    # The fit is (4 * 1 + 3 * 0.75) / (1 + 0.75**2 + (2**-7 * 0.75)**2), nearest to 4.0.
    byte = 0x408 - base
    assert message[0].tolist() == [
        base,
        15 | 14 << 4 | 0 << 8,
        byte | byte << 8 | 0 << 16,
        # Three codes of 1 bit in a word a row is one each: in three words they would be neighbours.
        0b010,
        0b001,
        0b000,
    ]
    out = dequantize(ops, message, layout)
    f = 2.0**-7 * 3
    assert out.tolist() == [4.0, -3.0, f, -4.0, 3.0, f, 0.0, 0.0, 0.0]


@both
def test_a_message_of_groups_written_out(ops):
    """Nine groups of 8 and eight codes a word: code ``2 i + j`` is in place i of word j."""
    layout = MatrixLayout(rows=1, columns=9 * 8, group=8)
    grad = torch.ones(1, layout.columns)
    places = [3, 0, 7, 5, 1, 2, 6, 4, 0]
    for t, place in enumerate(places):
        grad[0, 8 * t + place] = -1.125 if t % 2 else 1.125
    message = oracle.poisoned(1, layout.words, dtype=torch.int32)
    ops.quantize_matrix(grad, None, message, layout=layout, average=0.0)
    codes = [place + 8 * (t % 2) for t, place in enumerate(places)]
    words = [w & oracle.MASK for w in message[0].tolist()]
    # All columns have scale 1, and the row's is 1.125; the largest sum is that, of exponent 127.
    assert words[0] == 8 * 127 - 136
    assert words[1:10] == [0xFFFF_FFFF] * 9
    assert words[10] == 0x3F9 - words[0]
    assert words[11:] == [
        sum(code << 4 * i for i, code in enumerate(codes[j::2])) for j in range(2)
    ]
    out = dequantize(ops, message, layout)
    assert torch.equal(out, torch.where(grad[0].abs() == 1.125, grad[0], 0.0))
