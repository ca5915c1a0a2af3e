"""Properties of hashing and of whole sketches, over random arguments."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tagc import CountSketch
from tagc.ops.reference.sketch import fmix32, positions
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS

examples = settings(deadline=None, max_examples=60, derandomize=True)
integer_symbols = st.sampled_from(["int8x4", "int16x2", "int32x1"])


@given(st.lists(st.integers(0, 2**32 - 1), unique=True, min_size=2, max_size=200))
@examples
def test_the_mix_is_a_bijection(words):
    mixed = fmix32(torch.tensor(words))
    assert 0 <= int(mixed.min()) <= int(mixed.max()) < 2**32
    assert mixed.unique().numel() == len(words)


@given(st.integers(1, 10**6), st.integers(1, 20_000), st.integers(-(2**31), 2**31 - 1))
@examples
def test_a_key_has_one_cell_in_every_partition(numel, keys, seed):
    layout = plan_layout(numel, SYMBOLS["int8x4"], keys)
    some = torch.arange(0, layout.groups, max(1, layout.groups // 500))
    where = positions(some, torch.tensor([seed], dtype=torch.int32), layout)
    assert where.shape == (some.numel(), layout.hashes)
    partitions = torch.arange(layout.hashes).expand_as(where)
    assert torch.equal(where // layout.partition, partitions)


@given(
    integer_symbols,
    st.integers(1, 3000),
    st.floats(0, 1),
    st.integers(1, 8),
    st.integers(-(2**31), 2**31 - 1),
)
@examples
def test_sums_decode_exactly(symbol, numel, density, ranks, seed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    levels = SYMBOLS[symbol].levels(ranks)
    present = torch.rand(ranks, numel, generator=generator) < density
    x = torch.randint(-levels, levels + 1, (ranks, numel), generator=generator) * present
    groups = -(-numel // SYMBOLS[symbol].lanes)
    codec = CountSketch(numel, keys=groups, symbol=symbol, seed=seed)
    total = codec.encode(x[0])
    for row in x[1:]:
        total = codec.encode(row) + total
    decoded = codec.decode(total)
    assert decoded.unresolved == 0
    assert torch.equal(decoded.values, x.sum(0).to(torch.int32))
