"""Layouts, bitmaps, and where keys lie."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import oracle
from tagc.ops.bitmap import from_bitmap, to_bitmap
from tagc.ops.reference import sketch
from tagc.ops.sketch import MAX_HASHES, plan_layout
from tagc.ops.symbols import SYMBOLS

examples = settings(deadline=None, max_examples=80, derandomize=True)
INT8, INT32 = SYMBOLS["int8x4"], SYMBOLS["int32x1"]
LARGE = 1 << 30
SEEDS = [0, 12345, -(2**31)]


@given(st.lists(st.booleans(), max_size=200))
@examples
def test_bitmap_round_trip(bits):
    present = torch.tensor(bits, dtype=torch.bool)
    words = to_bitmap(present)
    assert words.dtype == torch.int32
    assert words.shape == (-(-len(bits) // 32),)
    for w, word in enumerate(words.tolist()):
        chunk = bits[32 * w : 32 * w + 32]
        assert word & oracle.MASK == sum(1 << i for i, bit in enumerate(chunk) if bit)
    assert torch.equal(from_bitmap(words, len(bits)), present)


@given(st.sampled_from(list(SYMBOLS.values())), st.integers(0, 1 << 24), st.integers(0, 1 << 24))
@examples
def test_shape(symbol, numel, keys):
    layout = plan_layout(numel, symbol, keys)
    assert layout.numel == numel
    assert layout.symbol is symbol
    assert (layout.groups - 1) * symbol.lanes < numel <= layout.groups * symbol.lanes or numel == 0
    assert (layout.words - 1) * 32 < layout.groups <= layout.words * 32 or numel == 0
    assert layout.index_words == layout.words + 1
    assert layout.keys == min(keys, layout.groups)
    assert layout.cells == layout.hashes * layout.partition
    assert layout.keys <= layout.cells <= layout.groups
    assert 1 <= layout.hashes <= MAX_HASHES
    assert layout.direct == (layout.hashes == 1)
    if layout.direct:
        assert layout.cells == layout.groups
    else:
        assert layout.hashes >= 3
        assert layout.partition >= 32


def test_groups_are_counted_and_not_elements():
    assert plan_layout(4 * (2**31 - 1), INT8, 10).groups == 2**31 - 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("keys", [0, 100, 5000, 1 << 22])
def test_positions_follow_the_definition(seed, keys):
    layout = plan_layout(LARGE, INT32, keys)
    ids = [0, 1, 31, 32, 12345, 2**20, LARGE - 1]
    where = sketch.positions(torch.tensor(ids), torch.tensor([seed], dtype=torch.int32), layout)
    assert where.tolist() == [oracle.cells_of(k, seed, layout) for k in ids]
