"""Sums of rows on a CPU: the order of additions that the format asks for, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from tagc.ops.cpu.matrix import code_sum
from tagc.ops.matrix import BITS, GROUP, SPAN, MatrixLayout
from tagc.ops.reference import matrix as reference

SIZES = [*((bits, 1) for bits in BITS), (1, GROUP)]


@njit
def _sum(c, lanes, words, table):
    return code_sum(c, lanes, words, table)


@pytest.mark.parametrize(("bits", "group"), SIZES)
@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 480, 500, 1024, SPAN, SPAN + 7, 3 * SPAN])
def test_rows_are_summed_in_the_order_of_the_format(bits, group, width):
    layout = MatrixLayout(rows=1, columns=width * group, bits=bits, group=group)
    rng = np.random.default_rng(width)
    lanes, words, wide = layout.places, layout.row_words, 1
    while wide < words and wide < layout.word_lanes:
        wide *= 2
    for _ in range(4):
        # Sizes differ so much that another order gives other bits.
        c = (rng.standard_normal(layout.codes) * 10.0 ** rng.integers(-3, 4, layout.codes)).astype(
            np.float32
        )
        scratch = np.full(2 * lanes * wide, np.nan, np.float32)
        found = _sum(c, np.uint64(lanes), np.uint64(words), scratch)
        expected = reference.code_sum(torch.from_numpy(c), layout)
        assert torch.equal(torch.tensor(found), expected)
