"""Symbols against their definition; sums of symbols are sums of lanes."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import oracle
from tagc.ops.symbols import SYMBOLS, pack, resolve_symbol, unpack, wrap_int32

by_name = pytest.mark.parametrize("symbol", SYMBOLS.values(), ids=lambda s: s.name)
examples = settings(deadline=None, max_examples=60, derandomize=True)


def lane(symbol):
    low, high = -symbol.qmax - 1, symbol.qmax
    return st.one_of(st.integers(low, high), st.sampled_from([low, low + 1, -1, 0, 1, high]))


def groups(symbol):
    return st.lists(
        st.lists(lane(symbol), min_size=symbol.lanes, max_size=symbol.lanes),
        min_size=1,
        max_size=20,
    )


def test_formats():
    shapes = {s.name: (s.lanes, s.bits) for s in SYMBOLS.values()}
    assert shapes == {"int8x4": (4, 8), "int16x2": (2, 16), "int32x1": (1, 32)}


def test_worked_example():
    symbol = SYMBOLS["int8x4"]
    q = torch.tensor([[-1, 2, 0, 0], [1, -2, 0, 3]])
    v = pack(q, symbol)
    assert v.tolist() == [511, 1 - 512 + 3 * 2**24]
    assert unpack(v.sum(0, dtype=torch.int32), symbol).tolist() == [0, 0, 0, 3]


@given(st.integers(-(2**62), 2**62))
@examples
def test_wrap_int32(v):
    wrapped = wrap_int32(torch.tensor([v]))
    assert wrapped.dtype == torch.int32
    assert wrapped.item() == oracle.signed(v, 32)


@by_name
@given(data=st.data())
@examples
def test_pack_follows_the_definition_and_unpack_undoes_it(symbol, data):
    q = data.draw(groups(symbol))
    v = pack(torch.tensor(q), symbol)
    assert v.dtype == torch.int32
    assert v.tolist() == [oracle.pack(row, symbol.bits) for row in q]
    lanes = unpack(v, symbol)
    assert lanes.dtype == torch.int32
    assert lanes.tolist() == q


@by_name
@given(v=st.integers(-(2**31), 2**31 - 1))
@examples
def test_every_word_is_the_symbol_of_its_lanes(symbol, v):
    lanes = unpack(torch.tensor([v], dtype=torch.int32), symbol)
    assert lanes.tolist() == [oracle.unpack(v, symbol.lanes, symbol.bits)]
    assert pack(lanes, symbol).tolist() == [v]


@by_name
@given(data=st.data())
@examples
def test_sums_that_fit_decode_whatever_overflowed_before(symbol, data):
    """All but the last rank send anything; the last brings every lane sum back into range."""
    ranks = data.draw(st.integers(2, 12))
    sent = data.draw(
        st.lists(
            st.lists(lane(symbol), min_size=symbol.lanes, max_size=symbol.lanes),
            min_size=ranks - 1,
            max_size=ranks - 1,
        )
    )
    total = data.draw(st.lists(lane(symbol), min_size=symbol.lanes, max_size=symbol.lanes))
    sent.append([t - sum(column) for t, column in zip(total, zip(*sent, strict=True), strict=True)])
    # The balancing lanes may need more than their bits: the definition covers them all the same.
    words = torch.tensor([oracle.pack(q, symbol.bits) for q in sent], dtype=torch.int32)
    for order in (range(ranks), range(ranks)[::-1], data.draw(st.permutations(range(ranks)))):
        partial = torch.zeros((), dtype=torch.int32)
        for r in order:
            partial = partial + words[r]
        assert unpack(partial, symbol).tolist() == total


def test_int8_overflows_on_the_way():
    """Not a vacuous property: 100 + 100 does not fit int8, 100 + 100 - 100 does."""
    symbol = SYMBOLS["int8x4"]
    a = pack(torch.tensor([100, -100, 100, -100]), symbol)
    assert unpack(a + a, symbol).tolist() != [200, -200, 200, -200]
    for order in itertools.permutations([a, a, -a]):
        assert unpack(order[0] + order[1] + order[2], symbol).tolist() == [100, -100, 100, -100]


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
def test_levels_of_too_many_ranks(symbol):
    assert symbol.levels(symbol.qmax) == 1
    with pytest.raises(ValueError, match=rf"{symbol.name} cannot hold a sum over .* 'auto'"):
        symbol.levels(symbol.qmax + 1)


@by_name
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8])
def test_step_shift_leaves_the_headroom(symbol, world):
    """``levels * step`` lies within a factor of two below ``2**headroom`` thresholds, or at it."""
    levels = symbol.levels(world)
    reach = levels * 2.0 ** -symbol.step_shift(levels)
    assert 0.49 < reach / 2**symbol.headroom < 2
    assert 2.0 ** -symbol.step_shift(levels) <= 1  # the threshold itself is not rounded to nothing


@pytest.mark.parametrize(
    ("world", "name"),
    [
        (1, "int8x4"),
        (18, "int8x4"),
        (19, "int16x2"),
        (4681, "int16x2"),
        (4682, "int32x1"),
        (306783378, "int32x1"),
    ],
)
def test_auto_is_the_narrowest_with_7_levels(world, name):
    symbol = resolve_symbol("auto", world)
    assert symbol.name == name
    assert math.floor(symbol.qmax / world) >= 7


def test_names_resolve_to_themselves():
    for name, symbol in SYMBOLS.items():
        assert resolve_symbol(name, 2) is symbol


@pytest.mark.parametrize(
    ("name", "world", "message"),
    [
        ("int8", 2, r"unknown symbol 'int8'; choose from int8x4, .*, int32x1 or auto"),
        ("int8x4", 128, r"int8x4 cannot hold a sum over 128 ranks"),
        ("auto", 306783379, r"no symbol can hold a sum over 306783379 ranks"),
    ],
)
def test_errors(name, world, message):
    with pytest.raises(ValueError, match=message):
        resolve_symbol(name, world)
