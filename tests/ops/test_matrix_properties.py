"""Messages of matrices: what holds for all of them."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.matrix_cases import (
    F32,
    Case,
    both,
    dequantize,
    make_case,
    quantize,
    sizes_on_both,
    some_sizes,
)
from tagc.ops.matrix import MatrixLayout

values_ = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-4, 4, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0]),
)


@some_sizes
@given(
    pairs=st.lists(st.tuples(values_, values_), min_size=1, max_size=80),
    rows=st.integers(1, 6),
    which=st.integers(0, 59),
    level=st.sampled_from([0.5, 1.0, 2.0]),
)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_what_is_sent_plus_what_stays_is_what_was_there(ops, sizes, pairs, rows, which, level):
    """Within half a unit in the last place of what stays; to the bit where no code points."""
    size = sizes[which % len(sizes)]
    columns = -(-len(pairs) // rows)
    flat = torch.zeros(2, rows * columns)
    flat[:, : len(pairs)] = torch.tensor(pairs).T / 4
    layout = MatrixLayout(rows=rows, columns=columns, bits=size[0], group=size[1], level=level)
    case = Case(flat[:1].clone(), flat[1:].clone(), layout)
    message, left = quantize(ops, case)
    assert left is not None
    sent = dequantize(ops, message, layout)
    there = case.x.flatten()
    silent = sent == 0
    assert torch.equal(left[0][silent], there[silent])
    off = (sent.double() + left[0].double() - there.double()).abs()
    assert bool((off <= left[0].double().abs() * 2.0**-24 + 2.0**-150).all())
    spoken = (~silent).view(rows, columns)
    if size[1] > 1:
        assert int(spoken.sum(-1).amax()) <= layout.codes


@some_sizes
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(2, 6), st.integers(1, 70)),
    which=st.integers(0, 59),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_a_row_that_is_not_finite_is_alone(ops, sizes, seed, shape, which, bad):
    size = sizes[which % len(sizes)]
    rng = np.random.default_rng(seed)
    case = make_case(shape, 2, (*size, F32, F32), rng)
    row = int(rng.integers(shape[0]))
    case.grad[1, row * shape[1] + int(rng.integers(shape[1]))] = bad
    message, left = quantize(ops, case)
    assert left is not None
    assert bool(left.isfinite().all())
    said = dequantize(ops, message, case.layout).view(shape)
    assert said.isnan().all(-1).tolist() == [i == row for i in range(shape[0])]
    assert bool(said[[i for i in range(shape[0]) if i != row]].isfinite().all())
    assert bool(dequantize(ops, message[:1], case.layout).isfinite().all())


@some_sizes
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 90)),
    which=st.integers(0, 59),
    level=st.sampled_from([0.5, 1.0]),
)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_what_stays_of_a_row_is_no_more_than_the_row(ops, sizes, seed, shape, which, level):
    """Where codes have one size: a fit's energy is `(2 - s) s` of it, with `s` the level times at
    most 1 + 2**-4 by rounding, and never negative. What is left of a row of equal magnitudes is
    little."""
    sizes = [s for s in sizes if s[0] == 1]
    size = sizes[which % len(sizes)]
    rng = np.random.default_rng(seed)
    case = make_case(shape, 1, (*size, F32, F32), rng, level=level)
    _, left = quantize(ops, case)
    assert left is not None
    before = case.x[0].double().square().sum(-1)
    after = left.double().view(shape).square().sum(-1)
    assert bool((after <= before * (1 + 2.0**-20) + 2.0**-200).all()), (after / before).max()


@both
def test_equal_magnitudes_are_sent_whole(ops):
    signs = torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], (1, 6 * 50)))
    layout = MatrixLayout(rows=6, columns=50)
    message, left = quantize(ops, Case(signs.float() * 1.5, torch.zeros(1, 300), layout))
    assert left is not None
    assert not left.any()
    assert torch.equal(dequantize(ops, message, layout), signs[0].float() * 1.5)


@sizes_on_both
def test_sums_of_messages(bits, group, ops):
    """In float64 the sum of what single messages say, within roundings of float32."""
    rng = np.random.default_rng(5)
    for divisor in (1, 7):
        case = make_case((9, 65), 7, (bits, group, F32, F32), rng)
        message, _ = quantize(ops, case)
        single = torch.stack([dequantize(ops, m[None], case.layout) for m in message]).double()
        out = dequantize(ops, message, case.layout, F32, divisor).double()
        bound = 2.0**-24 * 8 * single.abs().sum(0) / divisor
        assert bool(((out - single.sum(0) / divisor).abs() <= bound).all())
        assert single.any()


@both
def test_a_running_average(ops):
    """LoCo: a share of the old residual stays, the rest is this step's error."""
    grad, residual = torch.tensor([[4.0, -2.0]]), torch.tensor([[0.0, -1.0]])
    # Columns of 4 and 3 have scales 1 and 0.75; both are said exactly, by a row's scale of 4.
    case = Case(grad, residual, MatrixLayout(rows=1, columns=2))
    message, left = quantize(ops, case, 0.75)
    assert dequantize(ops, message, case.layout).tolist() == [4.0, -3.0]
    assert left is not None
    assert left.tolist() == [[0.0, 0.75 * -1.0]]
