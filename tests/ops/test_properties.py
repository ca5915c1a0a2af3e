"""What holds for all inputs: nothing is lost, and chance is right on average.

Properties are those of the reference; the CPU's operators have its bits for the same inputs.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import oracle
from support.edges import BF16, F32, blocks, both_ways, changed, encoding, matrix
from support.trials import Case, case_with
from tagc.codecs.sketch.plan import step_scale
from tagc.ops import get_ops
from tagc.ops.bitmap import from_bitmap
from tagc.ops.blocks import BlockLayout
from tagc.ops.symbols import SYMBOLS
from tagc.ops.thresholds import EXPONENT, SIDE, STATES, THRESHOLD, step_of
from tagc.ops.torch_operators import Copy, Subtract, copy_or_spoil, subtract_at_once

CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
examples = settings(deadline=None, max_examples=25, derandomize=True)
number = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-4, 4, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0]),
)
pairs_of = st.lists(st.tuples(number, number), min_size=1, max_size=80)


@pytest.mark.parametrize("old", [F32, BF16, torch.float16])
@pytest.mark.parametrize("new", [F32, BF16, torch.float16])
def test_one_kernel_does_the_same(new: torch.dtype, old: torch.dtype) -> None:
    some = torch.tensor([0.0, -0.0, 1.0, -3.1e-5, 65504.0, torch.inf, -torch.inf, torch.nan])
    x, y = (some.to(dtype) for dtype in (new, old))
    x, y = torch.cartesian_prod(x.float(), y.float()).T.contiguous()
    at_once, wanted = torch.empty_like(x), torch.empty_like(x)
    subtract_at_once(x.to(new), y.to(old), at_once)
    Subtract().run(x.to(new), y.to(old), wanted)
    assert oracle.same_values(at_once, wanted)
    for flag in (torch.tensor([False]), torch.tensor([True])):
        target = torch.zeros(len(x), 1, dtype=old)
        copy_or_spoil(x.to(new)[:, None], target, flag)
        wanted = torch.zeros_like(target)
        Copy().run(x.to(new)[:, None], wanted, flag)
        assert oracle.same_values(target, wanted)
        assert target.isnan().all() or not flag


def run(case: Case) -> dict[str, Tensor]:
    want, got = case.run(REFERENCE, Tensor.clone), case.run(CPU, Tensor.clone)
    for name, x in want.items():
        same = oracle.same_values if x.dtype.is_floating_point else torch.equal
        assert same(got[name], x), name
    return want


@given(pairs_of, st.sampled_from([(4, BF16), (4, F32), (8, F32)]))
@examples
def test_what_blocks_send_plus_what_stays_is_what_was_there(pairs, form):
    """To the last bit; a bfloat16 residual is off by its rounding, half of 2**-7."""
    bits, dtype = form
    grad, residual = (torch.tensor(pairs).T.contiguous()[:, None] / 4).unbind(0)
    residual = residual.to(dtype).clamp(-1e38, 1e38)
    encode, decode = map(run, blocks(grad, bits, residual, divisor=1))
    exact = (grad + residual.float()).double() - decode["out"].double()
    if dtype == F32:
        assert torch.equal(encode["residual"].double(), exact)
    else:
        off = (encode["residual"].double() - exact).abs()
        assert bool((off <= exact.abs() * 2.0**-8 + 2.0**-134).all())


@given(pairs_of, st.integers(1, 6), st.sampled_from([0.5, 1.0, 2.0]))
@examples
def test_what_matrices_send_plus_what_stays_is_what_was_there(pairs, rows, level):
    """Within half a unit in the last place of what stays, and to the bit where nothing is sent.
    What stays of a row has no more energy than the row: a fit's is `(2 - s) s` of it, with `s` the
    level times at most 1 + 2**-4 by rounding."""
    columns = -(-len(pairs) // rows)
    flat = torch.zeros(2, rows * columns)
    flat[:, : len(pairs)] = torch.tensor(pairs).T / 4
    x, residual = flat.view(2, rows, columns)
    encode, decode = map(run, matrix(x, 1, residual[None].clone(), level=level, divisor=1))
    left, sent = encode["residual"][0], decode["out"][0]
    there = (x + residual).flatten()
    silent = sent == 0
    assert torch.equal(left[silent], there[silent])
    off = (sent.double() + left.double() - there.double()).abs()
    assert bool((off <= left.double().abs() * 2.0**-24 + 2.0**-150).all())
    if level < 2 and there.abs().max() < 2.0**64:  # larger ones count as this in a fit
        before, after = (v.double().view(rows, columns).square().sum(-1) for v in (there, left))
        assert bool((after <= before * (1 + 2.0**-20) + 2.0**-200).all())


# The smallest threshold for which every |x| up to 2048 is below 2**24 steps, see `encode`.
CONSERVED = [("int8x4", F32, 2.0**-6), ("int16x2", F32, 2.0**-4), ("int32x1", F32, 2.0**5)]
small = st.floats(-1024, 1024, width=32)


@given(
    st.lists(st.tuples(small, small), min_size=1, max_size=40),
    st.sampled_from(CONSERVED),
    st.floats(0, 8),
    st.integers(0, 40),
)
@examples
def test_what_sketches_send_plus_what_stays_is_what_was_there(pairs, form, octaves, room):
    name, dtype, least = form
    grad, residual = torch.tensor(pairs).T.contiguous()[:, None]
    symbol, grad = SYMBOLS[name], grad.to(BF16 if name == "int16x2" else F32)
    levels, threshold = symbol.levels(1), torch.tensor([least * 2.0**octaves])
    step = step_of(threshold, step_scale(symbol, levels))
    made = encoding((name, grad.dtype, dtype), len(pairs), "room for all", W=1)
    made.tensors.update(grad=grad, residual=residual, threshold=threshold, step=step)
    encode, decode = map(run, both_ways(changed(made, levels=levels, capacity=room), 1))
    layout = made.call["layout"]
    assert decode["stats"].tolist() == [encode["counts"][0, 2], 0]
    x, left = grad[0].float() + residual[0], encode["residual"][0]
    if name == "int16x2":  # whose result is in bfloat16
        assert oracle.same_values(decode["out"] + 0.0, (x - left).to(BF16) + 0.0)
        return
    sent = decode["out"]
    assert torch.equal(sent.double() + left.double(), x.double())
    # Kept elements that do not saturate are within half a step of what is sent.
    kept = from_bitmap(encode["index"][0, :-1], layout.groups).repeat_interleave(symbol.lanes)
    kept = kept[: len(pairs)]
    inside = kept & (x.abs() <= levels * step)
    assert bool(((x - sent).abs()[inside] <= step / 2).all())
    assert not sent[~kept].any()


# Stochastic rounding


def mean_sent(x: Tensor, layout: BlockLayout, N: int) -> Tensor:
    """The mean of what ``N`` seeds send of ``x`` ``[1, n]``."""
    message = torch.empty(N, layout.words, dtype=torch.int32)
    seeds = torch.arange(N, dtype=torch.int32)
    tensors = {"grad": x.expand(N, -1).contiguous(), "residual": None, "message": message}
    made = case_with("quantize", tensors | {"dither": seeds}, layout=layout, average=0.0)
    tensors = {"message": run(made)["message"][None], "out": torch.empty(1, layout.numel)}
    return run(case_with("dequantize", tensors, layout=layout, divisor=N))["out"][0]


def test_the_mean_is_right():
    """Codes of N seeds have the mean x / s: each is one of two neighbours, so the deviation of the
    mean is at most s / (2 sqrt N), and 6 of those are exceeded once in 10^9."""
    N = 1000
    x = torch.linspace(-1, 1, 256)[None] * 7  # a scale of 1 in the outer blocks
    x[0, ::64] = 7.0
    mean = mean_sent(x, BlockLayout(numel=256, bits=4, block=64), N)
    assert (mean - x[0]).abs().max() <= 6 / (2 * math.sqrt(N)) + 2**-16


def test_what_codes_can_say_is_not_touched():
    x = torch.arange(-63.0, 65.0, 2.0)[None]
    x[0, 0], x[0, 5] = 127.0, 0.0
    assert torch.equal(mean_sent(x, BlockLayout(numel=64, bits=8, block=64), 32), x[0])


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_a_count_that_cannot_be_raises_on_no_rank(ops):
    """A state is refused for it; an exception in a step would be one rank's, and a hang."""
    counts, one = torch.tensor([[[-21, 100, 5, 0]]], dtype=torch.int32), torch.ones(1)
    state = torch.ones(STATES, 1, 1)
    # The divisor of the factor is 0 then.
    state[THRESHOLD], state[SIDE], state[EXPONENT] = 16.0, 0, 0.25
    ops.steer(counts, 11 * one, one, one, state)
    assert state[THRESHOLD].item() == 1.0
