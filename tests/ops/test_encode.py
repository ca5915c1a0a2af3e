"""Encoding of sketches: the reference against the oracle, and what is not finite."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from support import oracle
from support.sketch_cases import (
    CPU,
    F32,
    MODES,
    REFERENCE,
    SIZES,
    check_against_oracle,
    decode,
    encode,
    make_case,
    share,
    spoil,
    variants,
)


@pytest.mark.some(12)
@pytest.mark.parametrize("mode", MODES)
@variants
def test_reference_encodes_by_the_contract(symbol, grad_dtype, residual_dtype, mode):
    rng = np.random.default_rng(0)
    for n in SIZES:
        case = make_case(n, 2, symbol, grad_dtype, residual_dtype, mode, rng)
        check_against_oracle(case, encode(REFERENCE, case))
        spoil(case, rng)
        check_against_oracle(case, encode(REFERENCE, case))


def test_modes_are_what_they_say():
    rng = np.random.default_rng(0)
    for mode in MODES:
        case = make_case(1000, 2, "int8x4", F32, F32, mode, rng)
        above, nonzero, kept, clipped = encode(REFERENCE, case).counts.unbind(1)
        assert bool((above <= nonzero).all())
        assert bool((above > case.capacity).all()) == (
            mode in ("overflow", "nothing fits", "all above")
        )
        assert bool((kept == 0).all()) == (mode in ("nothing fits", "empty"))
        assert torch.equal(kept, nonzero) == (mode == "room for all")
        assert bool((clipped <= kept).all())
        assert bool(clipped.any()) == (mode not in ("nothing fits", "empty"))


@pytest.mark.some(4)
@pytest.mark.parametrize("mode", ["usual", "room for all"])
@variants
def test_reference_encodes_a_support_by_the_contract(symbol, grad_dtype, residual_dtype, mode):
    rng = np.random.default_rng(6)
    for n, bad in itertools.product(SIZES, (False, True)):
        case = make_case(n, 2, symbol, grad_dtype, residual_dtype, mode, rng)
        share(case, rng, bad=bad)
        got = encode(REFERENCE, case)
        check_against_oracle(case, got)
        assert got.index[:, -1].tolist() == [int(bad), 0]


@pytest.mark.parametrize("mode", MODES)
def test_reference_selects_what_it_encodes(mode):
    rng = np.random.default_rng(3)
    for n, symbol in itertools.product((1, 33, 258), ("int8x4", "int32x1")):
        case = make_case(n, 2, symbol, F32, None, mode, rng)
        spoil(case, rng)
        layout, expected = case.layout, encode(REFERENCE, case)
        bitmap = oracle.widened(oracle.poisoned(2, layout.words, dtype=torch.int32))
        counts = oracle.poisoned(2, 4, dtype=torch.int32)
        REFERENCE.select(
            case.grad, case.threshold, bitmap, counts, layout=layout, capacity=case.capacity
        )
        oracle.check_margins(bitmap)
        assert torch.equal(bitmap, expected.index[:, :-1])
        assert torch.equal(counts[:, :3], expected.counts[:, :3])
        assert not counts[:, 3].any()


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
@variants
def test_non_finite_gradients_poison_and_leave_the_residual(
    symbol, grad_dtype, residual_dtype, ops
):
    rng = np.random.default_rng(2)
    for n in SIZES:
        case = make_case(n, 3, symbol, grad_dtype, residual_dtype, "usual", rng)
        spoil(case, rng)
        got = encode(ops, case)
        assert got.index[:, -1].tolist() == [1, 0, 0]
        if got.residual is not None and case.residual is not None:
            assert bool(got.residual.isfinite().all())
            bad = ~case.grad[0].isfinite()
            assert oracle.same_bits(got.residual[0][bad], case.residual[0][bad])
        # Three ranks with this index: one of them saw it, so all of the shard is NaN.
        cells = got.cells[0]
        out, _, _ = decode(ops, got.index, cells, case, grad_dtype, 3)
        assert bool(out.isnan().all())


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_a_sum_that_overflows_is_not_finite(ops):
    """Gradient and residual finite, their sum not."""
    case = make_case(8, 1, "int8x4", F32, F32, "usual", np.random.default_rng(0))
    assert case.residual is not None
    case.grad[0, 5], case.residual[0, 5] = 3e38, 2e38
    got = encode(ops, case)
    assert got.residual is not None
    assert got.index[0, -1] == 1
    assert oracle.same_bits(got.residual[0, 4:], case.residual[0, 4:])
