"""The count sketch on its own: the decoded sum of sketches is the sum of the vectors.

Observed failure rate: 0 of the 12,000 random sketches of the slow test, each with as many keys as
its layout is planned for; 0 of 300,000 such sketches of the operators alone, so below 1e-5 with
95% confidence.
"""

from functools import reduce
from operator import add

import numpy as np
import pytest
import torch

from support import oracle
from support.marks import slow
from tagc.codecs.sketch.count_sketch import CountSketch
from tagc.ops.symbols import SYMBOLS

CASES = 12_000


def vectors(name, numel, ranks, keys, kind, rng):
    """``[ranks, numel]`` int32 whose sums fit. Together they have ``keys`` groups."""
    symbol = SYMBOLS[name]
    groups, levels = -(-numel // symbol.lanes), symbol.levels(ranks)
    lanes = rng.integers(-levels, levels, (ranks, keys, symbol.lanes), endpoint=True)
    # One rank sends the key for certain, so that the table is full; the others may.
    certain = rng.integers(ranks, size=keys)
    lanes[(rng.random((ranks, keys)) < 0.5) & (np.arange(ranks)[:, None] != certain)] = 0
    x = torch.zeros(ranks, groups, symbol.lanes, dtype=torch.int32)
    x[:, oracle.support(kind, groups, keys, rng)] = torch.from_numpy(lanes.astype(np.int32))
    return x.flatten(1)[:, :numel]


def unresolved_after(rng):
    """Unresolved keys of a full table of a few ranks; everything else is checked here."""
    name, kind = [*SYMBOLS][rng.integers(3)], ("uniform", "rows")[rng.integers(2)]
    keys = int(2 ** rng.uniform(0, 12.5))
    groups, lanes = max(keys, int(keys * 2 ** rng.uniform(0, 8))), SYMBOLS[name].lanes
    numel = (groups - 1) * lanes + int(rng.integers(1, lanes + 1))
    x = vectors(name, numel, int(rng.integers(1, 6)), keys, kind, rng)
    codec = CountSketch(numel, keys=keys, symbol=name, seed=int(rng.integers(-(2**31), 2**31)))
    decoded = codec.decode(reduce(add, map(codec.encode, x)))
    assert decoded.values.dtype == torch.int32
    assert decoded.unresolved or torch.equal(decoded.values, x.sum(0, dtype=torch.int32))
    return decoded.unresolved


@pytest.mark.parametrize("cases", [CASES // 60, slow(CASES)])
def test_sums_are_exact(cases):
    rng = np.random.default_rng(0)
    failed = sum(unresolved_after(rng) > 0 for _ in range(cases))
    print(f"{failed} of {cases} random sketches left keys unresolved ({failed / cases:.1e})")
    assert failed == 0


@pytest.mark.parametrize(
    ("name", "step", "ranks"), [*zip(SYMBOLS, (2.0**-10, 1.0, 0.1), (1, 2, 4), strict=True)]
)
def test_float_input_is_rounded_to_steps(name, step, ranks):
    rng = np.random.default_rng(ranks)
    keys = 100 // SYMBOLS[name].lanes
    q = vectors(name, 2001, ranks, keys, "uniform", rng)
    # float64 input less than half a step away from the integers
    x = (q.double() + torch.from_numpy(rng.uniform(-0.4, 0.4, q.shape)) * (q != 0)) * step
    codec = CountSketch(2001, keys=keys, symbol=name)
    decoded = codec.decode(reduce(add, [codec.encode(row, step=step) for row in x]))
    assert decoded.unresolved == 0
    assert decoded.values.dtype == torch.float32
    assert torch.equal(decoded.values, q.sum(0).float() * step)


@pytest.mark.parametrize("load", [1, 1.3, 6])
@pytest.mark.parametrize("name", ["int8x4", "int16x2"])
def test_too_small_a_table_loses_the_2_core_and_nothing_else(name, load):
    """``load`` times the keys that the table is made for."""
    symbol = SYMBOLS[name]
    seed, keys = 3, 400
    numel = 40_003 * symbol.lanes
    codec = CountSketch(numel, keys=keys, symbol=name, seed=seed)
    rng = np.random.default_rng(1)
    groups = oracle.support("uniform", codec.layout.groups, round(load * keys), rng)
    lanes = rng.integers(1, 100, (2, len(groups), symbol.lanes))
    if symbol.lanes == 4:
        lanes = lanes % 60 + 1
    x = torch.zeros(2, codec.layout.groups, symbol.lanes, dtype=torch.int32)
    x[:, torch.from_numpy(groups)] = torch.from_numpy(lanes).to(torch.int32)
    x = x.flatten(1)[:, :numel]
    s = codec.encode(x[0]) + codec.encode(x[1])
    stuck = oracle.two_core(groups.tolist(), seed, codec.layout)
    assert bool(stuck) == (load > 1)
    decoded = codec.decode(s)
    assert decoded.unresolved == len(stuck)
    expected = x.sum(0, dtype=torch.int32)
    lost = torch.zeros(codec.layout.groups, dtype=torch.bool)
    lost[stuck] = True
    expected[lost.repeat_interleave(symbol.lanes)[:numel]] = 0
    assert torch.equal(decoded.values, expected)


@pytest.mark.parametrize(
    ("change", "step", "message"),
    [
        ({"seed": 1}, 1.0, "different seed: 0 and 1"),
        ({"keys": 60}, 1.0, "sketches of different layout: "),
        ({}, 2.0, r"different step: 1\.0 and 2\.0"),
    ],
)
def test_mismatching_sketches_do_not_add(change, step, message):
    arguments = {"numel": 1000, "keys": 20, "symbol": "int8x4", "seed": 0}
    a, b = (CountSketch(**kw) for kw in (arguments, {**arguments, **change}))
    s, t = a.encode(torch.zeros(1000), step=1.0), b.encode(torch.zeros(1000), step=step)
    with pytest.raises(ValueError, match=message):
        _ = s + t
    if change:
        with pytest.raises(ValueError, match="CountSketch with other arguments"):
            a.decode(t)


@pytest.mark.parametrize(
    ("symbol", "x", "step", "message"),
    [
        ("int8x4", torch.zeros(9, dtype=torch.int32), None, r"expected shape \(10,\), got \(9,\)"),
        ("int8x4", torch.zeros(10), None, "int8x4 needs a positive quantization step, got None"),
        ("int8x4", torch.zeros(10), float("nan"), "positive quantization step"),
        ("int8x4", torch.zeros(10, dtype=torch.int32), 1.0, "leave out step"),
        ("int8x4", torch.full((10,), 128), None, r"\[-128, 127\] \(in steps\) for int8x4"),
        ("int8x4", torch.full((10,), 127.6), 1.0, r"\[-128, 127\]"),
        ("int8x4", torch.full((10,), float("nan")), 1.0, r"\[-128, 127\]"),
        ("int32x1", torch.full((10,), 1 << 31), None, r"\[-2147483648, 2147483647\]"),
    ],
)
def test_what_cannot_be_encoded_is_refused(symbol, x, step, message):
    with pytest.raises(ValueError, match=message):
        CountSketch(10, keys=10, symbol=symbol).encode(x, step=step)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"symbol": "int8"}, "unknown symbol 'int8'; choose from"),
        ({"seed": 1 << 31}, "seed must fit 32 bits, got 2147483648"),
        ({"keys": -1}, "keys must not be negative"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        CountSketch(**{"numel": 10, "keys": 1, **arguments})
