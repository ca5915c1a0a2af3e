"""Undoing the lag of error feedback: written out, and errors bounded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tagc.ops import cpu, reference

both = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])


@both
def test_written_out(ops):
    """K = 1/2: twice the sum, less the last one; not finite is NaN, and nothing to the next."""
    decoded = torch.tensor([3.0, -1.0, torch.inf, torch.nan, 0.0])
    sent, out = torch.tensor([1.0, 0.5, 2.0, 2.0, -4.0]), torch.empty(5)
    ops.undo_lag(decoded, sent, out, torch.tensor([0.5, 0.5]))
    assert torch.equal(out[[0, 1, 4]], torch.tensor([5.0, -2.5, 4.0]))
    assert out[2:4].isnan().all()
    assert torch.equal(sent, torch.tensor([3.0, -1.0, 0.0, 0.0, 0.0]))


@both
def test_in_place(ops):
    x = torch.linspace(-2, 2, 999)
    decoded, (sent, other), out = x.clone(), (x.flip(0).clone() for _ in range(2)), x.new_empty(999)
    weights = torch.tensor([0.25, 0.75])
    ops.undo_lag(x, other, out, weights)
    ops.undo_lag(decoded, sent, decoded, weights)
    assert torch.equal(decoded, out)
    assert torch.equal(sent, other)


@both
def test_the_error_is_that_of_three_roundings(ops):
    """Of a product, a difference and a quotient, each within 2**-24 of what it rounds."""
    rng = np.random.default_rng(0)
    decoded, sent = (torch.from_numpy(rng.standard_normal(5000)).float() for _ in range(2))
    weights = torch.tensor([0.65, 0.35])
    late, share = weights.double()
    product = sent.double() * late
    exact = (decoded.double() - product) / share
    unit = 2.0**-24
    bound = unit * ((product.abs() + (decoded.double() - product).abs()) / share + exact.abs())
    out = torch.empty(5000)
    ops.undo_lag(decoded, sent.clone(), out, weights)
    assert bool(((out.double() - exact).abs() <= 1.001 * bound).all())
