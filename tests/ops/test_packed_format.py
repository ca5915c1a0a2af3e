"""Packed sparse messages: sizes of the layouts, and how an index is written."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import oracle
from support.packed_cases import (
    CPU,
    LOW_BITS,
    both,
    index_of,
    layout_of,
    written_out,
)
from tagc.ops.packed import plan_packed


def test_words_of_a_layout():
    bits = layout_of(100, 10, 0)
    assert (bits.low_words, bits.high_words, bits.index_words) == (0, 4, 4)
    assert bits.words == 2 + 4 + bits.values.words
    # 10 keys of 4 low bits; 10 ones among 99 >> 4 zeros.
    split = layout_of(100, 10, 4)
    assert (split.low_words, split.high_words) == (2, 1)
    assert split.words == 2 + 3 + split.values.words
    assert (split.groups, split.bitmap_words) == (100, 4)
    assert layout_of(0, 0, 0).words == 2


def test_the_plan_is_the_smallest():
    for n, group, density in itertools.product((0, 1, 1000, 10**6), (1, 4), (0, 0.001, 0.05, 0.5)):
        groups = -(-n // group)
        layout = plan_packed(n, capacity=int(density * groups), group=group)
        each = [replace(layout, low_bits=low).index_words for low in LOW_BITS]
        assert layout.index_words == min(each)
        assert layout.low_bits == LOW_BITS[each.index(min(each))]
    # 2 + log2(1 / density) bits a key.
    layout = plan_packed(1 << 20, capacity=1 << 16)
    assert layout.low_bits == 4
    assert layout.index_words * 32 == 6 * layout.capacity


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"numel": -1, "capacity": 0}, "numel must not be negative, got -1"),
        ({"numel": 9, "capacity": 1, "group": 3}, r"group must be one of \(1, 2, 4\), got 3"),
        ({"numel": 9, "capacity": 1, "group": 8}, r"group must be one of \(1, 2, 4\), got 8"),
        ({"numel": 1 << 31, "capacity": 1}, "fewer than 2.*31 groups"),
        ({"numel": 9, "capacity": 4, "group": 4}, r"capacity must be in \[0, 3\], got 4"),
        ({"numel": 9, "capacity": -1}, r"capacity must be in \[0, 9\], got -1"),
        ({"numel": 9, "capacity": 1, "bits": 5}, "bits must be one of"),
    ],
)
def test_layouts_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_packed(**arguments)


@both
def test_an_index_written_out(ops):
    """The example of :mod:`tagc.ops.packed`: low parts 3, 1, 2, high bits 0, 3 and 4."""
    layout = layout_of(16, 3, 2)
    assert index_of(ops, [[3, 9, 10]], layout).tolist() == [[0b10_01_11, 0b11001]]
    assert index_of(ops, [[3, 9, 10]], replace(layout, low_bits=0)).tolist() == [[0b110_0000_1000]]


@both
@given(
    groups=st.integers(1, 70) | st.integers(1, 70_000),
    rows=st.lists(st.sets(st.integers(0, 2**40), max_size=60), min_size=1, max_size=3),
    low_bits=st.sampled_from(LOW_BITS),
    spare=st.integers(0, 40),
)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_an_index_is_read_as_it_was_written(ops, groups, rows, low_bits, spare):
    members = [sorted({g % groups for g in row} | {groups - 1}) for row in rows]
    capacity = min(groups, max(map(len, members)) + spare)
    layout = layout_of(groups, capacity, low_bits)
    index = index_of(ops, members, layout)
    assert index.tolist() == [written_out(row, layout) for row in members]
    back = oracle.widened(oracle.poisoned(len(rows), layout.bitmap_words, dtype=torch.int32))
    ops.read_index(index, back, layout=layout)
    oracle.check_margins(back)
    assert [oracle.bits_of(row, 32 * layout.bitmap_words) for row in back.numpy()] == members


def test_more_groups_than_fit():
    """The CPU writes to raw memory, so it looks first."""
    layout = layout_of(64, 3, 4)
    with pytest.raises(ValueError, match="room for 3 groups got 4"):
        index_of(CPU, [[0, 1, 2, 3]], layout)
