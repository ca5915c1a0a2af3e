"""Layouts of messages, and messages written out by hand."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor

from support import oracle
from support.edges import blocks, matrix
from support.trials import BF16, Case, dense_layout
from tagc.ops import get_ops
from tagc.ops.blocks import BlockLayout
from tagc.ops.exact import ExactLayout
from tagc.ops.matrix import Matrices, MatrixLayout, parts_of, shard_shape
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS

REFERENCE = get_ops("cpu", "reference")


def words(case: Case) -> list[int]:
    """Of the first message, unsigned. Trials compare other implementations with the reference."""
    return [w & oracle.MASK for w in case.run(REFERENCE, Tensor.clone)["message"][0].tolist()]


keyed = partial(plan_layout, symbol=SYMBOLS["int32x1"], keys=1)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (ExactLayout, {"spans": (1 << 30,) * 2, "dtype": BF16}, r"fewer than 2\*\*31 .*2147483648"),
        (keyed, {"numel": -1}, "numel must not be negative, got -1"),
        (keyed, {"numel": 1, "keys": -1}, "keys must not be negative, got -1"),
        (keyed, {"numel": 1 << 31}, r"fewer than 2\*\*31 groups"),
    ],
)
def test_layouts_that_cannot_be(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


def test_words_of_layouts():
    layout = BlockLayout(numel=1000, bits=4, block=256)
    assert (layout.levels, layout.blocks) == (7, 4)
    assert (layout.scale_words, layout.block_words, layout.words) == (2, 32, 2 + 4 * 32)
    assert BlockLayout(numel=0, bits=8).words == 0
    layout = MatrixLayout(rows=5, columns=70, bits=2)
    assert (layout.numel, layout.places, layout.row_words) == (350, 16, 5)
    assert layout.head == (1, 9, 2)
    assert layout.words == 1 + 9 + 2 + 5 * 5
    assert MatrixLayout(rows=0, columns=5).words == 0
    several = MatrixLayout(rows=5, columns=70, bits=2, count=3)
    assert (several.numel, several.words, several.one) == (3 * 350, 3 * 37, layout)
    other = MatrixLayout(rows=7, columns=50, bits=2)
    both = Matrices((several, other))
    assert (both.numel, both.words) == (4 * 350, 3 * 37 + other.words)
    assert [*parts_of(both)][1:] == [
        (layout, slice(350, 700), slice(37, 74)),
        (layout, slice(700, 1050), slice(74, 111)),
        (other, slice(1050, 1400), slice(111, 111 + other.words)),
    ]


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


def test_blocks_written_out():
    """Neighbours lie in neighbouring words: with ``bits=8, block=32``, element 8 i + j is byte i
    of word j. The scale of 1.0 = 127 / 127 is 0x3F80."""
    grad = torch.zeros(1, 33)
    grad[0, :5] = torch.tensor([127.0, -1.0, 2.5, 3.5, 0.5])
    grad[0, 8], grad[0, 17], grad[0, 24], grad[0, 32] = 5.0, 6.0, -127.0, -254.0
    found = words(next(blocks(grad, 8, None)))
    assert found[0] == 0x4000_3F80  # the scales 1 and 2
    assert found[1:9] == [0x81_00_05_7F, 0x00_06_00_FF, 0x02, 0x04, 0x00, 0x00, 0x00, 0x00]
    assert found[9:] == [0x81, 0, 0, 0, 0, 0, 0, 0]


def test_a_matrix_written_out():
    """Of three rows and three columns, whose sums are 8, 6 and 0: scales 1, 0.75 and 2**-7 * 0.75.

    The largest sum has the biased exponent 130, and three rows are 2, rounded down, to the power
    of 1. Bits of 4.0, the upper 12 of them, are 0x408 = 1032.
    """
    encode, decode = matrix(torch.tensor([[4.0, -3, 0], [-4, 3, 0], [0, 0, 0]]), divisor=1)
    base = 8 * (130 - 1) - 136
    # The fit is (4 * 1 + 3 * 0.75) / (1 + 0.75**2 + (2**-7 * 0.75)**2), nearest to 4.0.
    byte = 0x408 - base
    assert words(encode) == [
        base,
        15 | 14 << 4 | 0 << 8,
        byte | byte << 8 | 0 << 16,
        # Three codes of 1 bit in a word a row is one each: in three words they would be neighbours.
        0b010,
        0b001,
        0b000,
    ]
    f = 2.0**-7 * 3
    out = decode.run(REFERENCE, Tensor.clone)["out"][0]
    assert out.tolist() == [4.0, -3.0, f, -4.0, 3.0, f, 0.0, 0.0, 0.0]


def test_of_what_is_too_small_nothing_is_sent():
    """The largest column's mean is `2**-60` or nothing is sent; rows reach 17 octaves below it."""
    for mean, sends in ((2.0**-60, True), (2.0**-60 * 0.874, False), (0.0, False), (2.0**63, True)):
        grad = torch.full((4, 8), mean)
        grad *= torch.tensor([4 - 2.0**-16 - 2.0**-18, 2.0**-16, 2.0**-18, 0.0])[:, None]
        encode, decode = (case.run(REFERENCE, Tensor.clone) for case in matrix(grad, divisor=1))
        assert torch.equal(decode["out"][0] + encode["residual"][0], grad.flatten())
        assert decode["out"].view(4, 8).any(-1).tolist() == [sends, sends, False, False]


def test_uncompressed_pieces_written_out():
    """Ranks are added in their order; three bfloat16 elements leave half a word; then a stamp."""
    layout = dense_layout(torch.bfloat16, [(1, 3)])
    ranks = torch.tensor([[9.0, 2.0**30, torch.nan, 1.0], [9.0, -(2.0**30), 1.0, 1.0 + 2**-8]])
    messages = oracle.poisoned(3, layout.tail + 4, dtype=torch.int32)
    stamp = torch.tensor([7, 0], dtype=torch.int32)
    for r, row in enumerate((*ranks, ranks.new_tensor([0.0, 3.0, 0.0, -1.5]))):
        stamp[1] = 4
        REFERENCE.put_dense(row[None], messages[r : r + 1], stamp, layout=layout)
    assert messages[0, 4:6].tolist() == [0x7FC0_4E80, 0x3F80]
    assert messages[1, 5] == 0x3F80  # halfway, to even
    assert messages[:, layout.tail : layout.tail + 2].tolist() == [[7, 5]] * 3
    assert bool((messages[:, [0, 3, -1]] == oracle.SENTINEL).all())
    out, wrong = torch.zeros(1, 4), torch.tensor([False])
    sizes = {"layout": layout, "divisor": 2}
    REFERENCE.sum_dense(messages[None], out, stamp, wrong, **sizes)
    assert oracle.same_values(out, torch.tensor([[0.0, 1.5, torch.nan, 0.25]]))
    messages[2, layout.tail + 1] += 1
    REFERENCE.sum_dense(messages[None], out, stamp, wrong, **sizes)
    assert bool(wrong)
    assert bool(out.isnan().all())
