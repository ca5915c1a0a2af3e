"""The count sketch on its own: the decoded sum of sketches is the sum of the vectors."""

import itertools
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch

from support import oracle
from tagc.codecs.sketch.count_sketch import CountSketch
from tagc.ops.symbols import SYMBOLS

DENSITIES = [0.001, 0.05, 0.2]
SIZES = [1, 3, 32, 129, 1000, 4097]


def sparse_integers(name, numel, ranks, density, kind, rng):
    """``[ranks, numel]`` int32 whose sums fit, and the number of distinct groups."""
    symbol = SYMBOLS[name]
    groups = -(-numel // symbol.lanes)
    levels = symbol.levels(ranks)
    x = np.zeros((ranks, groups, symbol.lanes), dtype=np.int32)
    for row in x:
        present = oracle.support(kind, groups, max(1, round(density * groups)), rng)
        row[present] = rng.integers(-levels, levels, (len(present), symbol.lanes), endpoint=True)
    x = x.reshape(ranks, -1)[:, :numel]
    union = np.zeros(groups * symbol.lanes, dtype=bool)
    union[:numel] = (x != 0).any(0)
    return torch.from_numpy(np.ascontiguousarray(x)), int(union.reshape(groups, -1).any(1).sum())


def check_exact(name, numel, ranks, density, kind, rng):
    x, keys = sparse_integers(name, numel, ranks, density, kind, rng)
    codec = CountSketch(numel, keys=keys, symbol=name, seed=int(rng.integers(-(2**31), 2**31)))
    total = x.sum(0, dtype=torch.int32)
    decoded = codec.decode(reduce(add, [codec.encode(row) for row in x]))
    assert decoded.unresolved == 0, (numel, ranks, density)
    assert decoded.values.dtype == torch.int32
    assert torch.equal(decoded.values, total), (numel, ranks, density)


@pytest.mark.parametrize(("name", "ranks"), [*zip(SYMBOLS, (1, 2, 5), strict=True)])
def test_sums_are_exact(name, ranks):
    rng = np.random.default_rng(ranks)
    for numel, density in itertools.product(SIZES, DENSITIES):
        for kind in ("uniform", "rows"):
            check_exact(name, numel, ranks, density, kind, rng)


@pytest.mark.parametrize(
    ("name", "step", "ranks"), [*zip(SYMBOLS, (2.0**-10, 1.0, 0.1), (1, 2, 4), strict=True)]
)
def test_float_input_is_rounded_to_steps(name, step, ranks):
    rng = np.random.default_rng(ranks)
    q, keys = sparse_integers(name, 2001, ranks, 0.05, "uniform", rng)
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
