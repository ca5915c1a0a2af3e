"""Packed groups: every word is the symbol of some lanes, and sums of all ranks' lanes fit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import oracle
from tagc.ops.symbols import SYMBOLS, pack, resolve_symbol, unpack, wrap_int32

examples = settings(deadline=None, max_examples=15, derandomize=True)
by_name = pytest.mark.parametrize("symbol", SYMBOLS.values(), ids=lambda s: s.name)


def lane(symbol):
    return st.integers(-(1 << (symbol.bits - 1)), (1 << (symbol.bits - 1)) - 1)


def group(symbol):
    return st.lists(lane(symbol), min_size=symbol.lanes, max_size=symbol.lanes)


@by_name
@given(v=st.integers(-(2**31), 2**31 - 1), data=st.data())
@examples
def test_pack_follows_the_definition_and_unpack_undoes_it(symbol, v, data):
    """And every word is the symbol of its lanes."""
    q = data.draw(st.lists(group(symbol), min_size=1, max_size=20))
    words = pack(torch.tensor(q), symbol)
    assert words.dtype == torch.int32
    assert words.tolist() == [oracle.pack(row, symbol.bits) for row in q]
    assert unpack(words, symbol).tolist() == q
    lanes = unpack(torch.tensor([v], dtype=torch.int32), symbol)
    assert lanes.tolist() == [oracle.unpack(v, symbol.lanes, symbol.bits)]
    assert pack(lanes, symbol).tolist() == [v]


@by_name
@given(data=st.data())
@examples
def test_levels_fit_every_rank(symbol, data):
    world = data.draw(st.integers(1, min(symbol.qmax, 1 << 20)))
    levels = symbol.levels(world)
    assert levels >= 1
    assert world * levels <= symbol.qmax
    assert torch.tensor(levels, dtype=torch.float32).item() == levels
    # No more than float32's 24 bits are given away.
    assert levels >= (symbol.qmax // world) * (1 - 2**-23)
    lanes = torch.full((symbol.lanes,), levels)
    for sign in (-1, 1):
        total = wrap_int32(pack(sign * lanes, symbol).to(torch.int64) * world)
        assert unpack(total, symbol).tolist() == [sign * world * levels] * symbol.lanes


@by_name
@pytest.mark.parametrize("world", [1, 8])
def test_step_shift_leaves_the_headroom(symbol, world):
    """``levels * step`` lies within a factor of two below ``2**headroom`` thresholds, or at it."""
    levels = symbol.levels(world)
    reach = levels * 2.0 ** -symbol.step_shift(levels)
    assert 0.49 < reach / 2**symbol.headroom < 2
    assert 2.0 ** -symbol.step_shift(levels) <= 1  # the threshold itself is not rounded to nothing


@pytest.mark.parametrize(
    ("world", "name"),
    [
        (18, "int8x4"),
        (19, "int16x2"),
        (4682, "int32x1"),
        (306783378, "int32x1"),
    ],
)
def test_auto_is_the_narrowest_with_7_levels(world, name):
    symbol = resolve_symbol("auto", world)
    assert symbol is SYMBOLS[name]
    assert math.floor(symbol.qmax / world) >= 7


def test_errors():
    with pytest.raises(ValueError, match=r"int8x4 cannot hold a sum over 128 ranks.* 'auto'"):
        resolve_symbol("int8x4", 128).levels(128)
    with pytest.raises(ValueError, match="no symbol can hold a sum over 306783379 ranks"):
        resolve_symbol("auto", 306783379)
