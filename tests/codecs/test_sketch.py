"""The count sketch on its own: the decoded sum of sketches is the sum of the vectors."""

import itertools

import numpy as np
import pytest
import torch

from support import oracle
from support.marks import slow
from tagc.codecs.sketch.count_sketch import CountSketch
from tagc.ops.symbols import SYMBOLS

DENSITIES = [0.001, 0.01, 0.05, 0.2]
SMALL = [1, 2, 3, 5, 31, 32, 33, 127, 129, 1000, 4097]
# numel, ranks, density, support
LARGE = [
    (1 << 17, 8, 0.2, "uniform"),
    (1 << 17, 8, 0.2, "rows"),
    ((1 << 18) + 3, 5, 0.05, "rows"),
    ((1 << 20) - 1, 2, 0.01, "uniform"),
]


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


def orders(sketches, rng):
    """Left to right, right to left, a random tree."""
    total = sketches[0]
    for s in sketches[1:]:
        total = total + s
    yield total
    total = sketches[-1]
    for s in sketches[-2::-1]:
        total = s + total
    yield total
    rest = list(sketches)
    while len(rest) > 1:
        a = rest.pop(int(rng.integers(len(rest))))
        b = rest.pop(int(rng.integers(len(rest))))
        rest.append(a + b)
    yield rest[0]


def check_exact(name, numel, ranks, density, kind, rng):
    x, keys = sparse_integers(name, numel, ranks, density, kind, rng)
    codec = CountSketch(numel, keys=keys, symbol=name, seed=int(rng.integers(-(2**31), 2**31)))
    total = x.sum(0, dtype=torch.int32)
    for s in orders([codec.encode(row) for row in x], rng):
        decoded = codec.decode(s)
        assert decoded.unresolved == 0, (numel, ranks, density)
        assert decoded.values.dtype == torch.int32
        assert torch.equal(decoded.values, total), (numel, ranks, density)


@pytest.mark.some(8)
@pytest.mark.parametrize("kind", ["uniform", "rows"])
@pytest.mark.parametrize("ranks", [r if r in (1, 2, 5, 8) else slow(r) for r in range(1, 9)])
@pytest.mark.parametrize("name", SYMBOLS)
def test_sums_are_exact(name, ranks, kind):
    rng = np.random.default_rng([ranks, list(SYMBOLS).index(name), kind == "rows"])
    for numel, density in itertools.product(SMALL, DENSITIES):
        check_exact(name, numel, ranks, density, kind, rng)


@pytest.mark.parametrize(("numel", "ranks", "density", "kind"), LARGE)
@pytest.mark.parametrize("name", SYMBOLS)
def test_large_sums_are_exact(name, numel, ranks, density, kind):
    rng = np.random.default_rng([numel, ranks, kind == "rows"])
    check_exact(name, numel, ranks, density, kind, rng)


def test_four_million_elements():
    check_exact("int8x4", 1 << 22, 8, 0.001, "uniform", np.random.default_rng(0))
    check_exact("int16x2", 1 << 22, 2, 0.01, "rows", np.random.default_rng(1))


def test_cells_and_lanes_may_overflow_on_the_way():
    codec = CountSketch(1000, keys=3, symbol="int8x4")
    x = torch.zeros(1000, dtype=torch.int32)
    x[[7, 500, 999]] = torch.tensor([127, -127, 127], dtype=torch.int32)
    plus, minus = codec.encode(x), codec.encode(-x)
    for s in (plus + plus + plus + minus + minus, (minus + minus) + (plus + (plus + plus))):
        assert torch.equal(codec.decode(s).values, x)


def test_the_reference_decodes_the_same():
    rng = np.random.default_rng(0)
    x, keys = sparse_integers("int16x2", 3001, 3, 0.05, "rows", rng)
    fast, slow = (
        CountSketch(3001, keys=keys, symbol="int16x2", ops=ops) for ops in ("cpu", "reference")
    )
    for row in x:
        assert torch.equal(fast.encode(row).cells, slow.encode(row).cells)
    s = slow.encode(x[0]) + fast.encode(x[1]) + slow.encode(x[2])
    assert torch.equal(fast.decode(s).values, x.sum(0, dtype=torch.int32))
    assert torch.equal(slow.decode(s).values, x.sum(0, dtype=torch.int32))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("step", [2.0**-10, 1.0, 0.1])
@pytest.mark.parametrize("name", SYMBOLS)
def test_float_input_is_rounded_to_steps(name, step, ranks):
    rng = np.random.default_rng(ranks)
    q, keys = sparse_integers(name, 2001, ranks, 0.05, "uniform", rng)
    # float64 input less than half a step away from the integers
    x = (q.double() + torch.from_numpy(rng.uniform(-0.4, 0.4, q.shape)) * (q != 0)) * step
    codec = CountSketch(2001, keys=keys, symbol=name)
    for s in orders([codec.encode(row, step=step) for row in x], rng):
        decoded = codec.decode(s)
        assert decoded.unresolved == 0
        assert decoded.values.dtype == torch.float32
        assert torch.equal(decoded.values, q.sum(0).float() * step)


def test_ties_round_to_even():
    codec = CountSketch(8, keys=2, symbol="int8x4")
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.4, 0.6])
    decoded = codec.decode(codec.encode(x, step=1.0))
    assert decoded.values.tolist() == [0, 2, 2, 0, -2, -2, 0, 1]


@pytest.mark.parametrize("load", [1, 1.3, 1.7, 2.5, 6])
@pytest.mark.parametrize("name", SYMBOLS)
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
    stuck = oracle.peel(s.cells.tolist(), groups.tolist(), seed, codec.layout).stuck
    assert bool(stuck) == (load > 1)
    decoded = codec.decode(s)
    assert decoded.unresolved == len(stuck)
    expected = x.sum(0, dtype=torch.int32)
    lost = torch.zeros(codec.layout.groups, dtype=torch.bool)
    lost[stuck] = True
    expected[lost.repeat_interleave(symbol.lanes)[:numel]] = 0
    assert torch.equal(decoded.values, expected)


@pytest.mark.parametrize("ops", ["cpu", "reference"])
@pytest.mark.parametrize("name", SYMBOLS)
@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_nothing_present(numel, name, ops):
    codec = CountSketch(numel, keys=4, symbol=name, ops=ops)
    x = torch.zeros(numel, dtype=torch.int32)
    s = codec.encode(x) + codec.encode(x)
    assert not s.cells.any()
    assert not s.index.any()
    decoded = codec.decode(s)
    assert torch.equal(decoded.values, x)
    assert decoded.unresolved == 0


def test_no_room_for_any_key_is_counted():
    codec = CountSketch(1000, keys=0, symbol="int32x1")
    x = torch.ones(1000, dtype=torch.int32)
    decoded = codec.decode(codec.encode(x))
    assert decoded.unresolved > 0
    assert int((decoded.values == 0).sum()) == decoded.unresolved
    assert bool(((decoded.values == 0) | (decoded.values == 1)).all())


def test_decode_leaves_the_sketch_alone():
    codec = CountSketch(1000, keys=20, symbol="int8x4")
    x = torch.zeros(1000, dtype=torch.int32)
    x[::100] = 5
    s = codec.encode(x)
    cells, index = s.cells.clone(), s.index.clone()
    assert torch.equal(codec.decode(s).values, codec.decode(s).values)
    assert torch.equal(s.cells, cells)
    assert torch.equal(s.index, index)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "different seed: 0 and 1"),
        ({"keys": 60}, "sketches of different layout: "),
        ({"symbol": "int16x2"}, "sketches of different layout: "),
        ({"numel": 1001}, "sketches of different layout: "),
    ],
)
def test_mismatching_sketches_do_not_add(change, message):
    arguments = {"numel": 1000, "keys": 20, "symbol": "int8x4", "seed": 0}
    a, b = (CountSketch(**kw) for kw in (arguments, {**arguments, **change}))
    s, t = (c.encode(torch.zeros(c.layout.numel, dtype=torch.int32)) for c in (a, b))
    with pytest.raises(ValueError, match=message):
        _ = s + t
    with pytest.raises(ValueError, match="CountSketch with other arguments"):
        a.decode(t)


def test_sketches_of_different_steps_do_not_add():
    codec = CountSketch(100, keys=5)
    a, b = codec.encode(torch.zeros(100), step=1.0), codec.encode(torch.zeros(100), step=2.0)
    with pytest.raises(ValueError, match=r"different step: 1\.0 and 2\.0"):
        _ = a + b
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = a + 1  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize(
    ("symbol", "x", "step", "message"),
    [
        ("int8x4", torch.zeros(9, dtype=torch.int32), None, r"expected shape \(10,\), got \(9,\)"),
        ("int8x4", torch.zeros(1, 10, dtype=torch.int32), None, r"got \(1, 10\)"),
        ("int8x4", torch.zeros(10), None, "int8x4 needs a positive quantization step, got None"),
        ("int8x4", torch.zeros(10), 0.0, "positive quantization step"),
        ("int8x4", torch.zeros(10), -1.0, "positive quantization step"),
        ("int8x4", torch.zeros(10), float("nan"), "positive quantization step"),
        ("int8x4", torch.zeros(10), float("inf"), "positive quantization step"),
        ("int8x4", torch.zeros(10, dtype=torch.int32), 1.0, "leave out step"),
        ("int8x4", torch.full((10,), 128), None, r"\[-128, 127\] \(in steps\) for int8x4"),
        ("int8x4", torch.full((10,), -129), None, r"\[-128, 127\]"),
        ("int8x4", torch.full((10,), 127.6), 1.0, r"\[-128, 127\]"),
        ("int8x4", torch.full((10,), float("nan")), 1.0, r"\[-128, 127\]"),
        ("int8x4", torch.full((10,), float("inf")), 1.0, r"\[-128, 127\]"),
        ("int16x2", torch.full((10,), 1 << 15), None, r"\[-32768, 32767\]"),
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
        ({"symbol": "auto"}, "unknown symbol 'auto'"),
        ({"seed": 1 << 31}, "seed must fit 32 bits, got 2147483648"),
        ({"keys": -1}, "keys must not be negative"),
        ({"numel": -1}, "numel must not be negative"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        CountSketch(**{"numel": 10, "keys": 1, **arguments})


def test_the_extremes_of_every_lane_are_accepted():
    for name, symbol in SYMBOLS.items():
        x = torch.tensor([-symbol.qmax - 1, symbol.qmax, 0, 1], dtype=torch.int32)
        codec = CountSketch(4, keys=4, symbol=name)
        assert torch.equal(codec.decode(codec.encode(x)).values, x)


def test_the_implementation_is_checked():
    with pytest.raises(ValueError, match="unknown implementation 'fast'"):
        CountSketch(4, keys=1, ops="fast").encode(torch.zeros(4, dtype=torch.int32))
