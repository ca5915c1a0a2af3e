"""Codes rounded up and down by chance: right on average, and every time the same."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from support import oracle
from support.block_cases import BF16, CPU, F16, F32, OPS, REFERENCE, both, dequantize, make_case
from support.marks import named, slow
from tagc.ops.blocks import BlockLayout

# Of the CPU's those that are compiled for all; float16 is widened first.
VARIANTS = [
    *((ops, *variant) for ops in OPS for variant in [(4, F32), (8, F16)]),
    (REFERENCE, 4, BF16),
    slow(CPU, 4, BF16),
]


def dithered(ops, grad: Tensor, layout: BlockLayout, seeds: list[int]) -> Tensor:
    message = oracle.widened(oracle.poisoned(len(grad), layout.words, dtype=torch.int32))
    dither = torch.tensor(seeds, dtype=torch.int32)
    ops.quantize(grad, None, message, layout=layout, average=0.0, dither=dither)
    oracle.check_margins(message)
    return message


@pytest.mark.parametrize(("ops", "bits", "dtype"), VARIANTS, ids=named)
def test_dithers_by_the_contract(ops, bits, dtype):
    rng = np.random.default_rng(1)
    for n, spoilt in itertools.product((1, 33, 300, 1000), (False, True)):
        case = make_case(n, 2, 32 if n < 100 else 128, (bits, dtype, None), rng, spoilt=spoilt)
        seeds = [7, -(2**31) + n]
        message = dithered(ops, case.grad, case.layout, seeds)
        for r, x in enumerate(case.x.numpy()):
            expected = oracle.quantize_row(x, bits, case.layout.block, seeds[r]).words
            assert message[r].tolist() == expected


def test_a_dither_written_out():
    """fmix32(0) is 0, so row 0's dither at places 0 and 1 is the smallest there is."""
    v = oracle.dither_of(0, 4)
    assert v[0] == v[1] == 2**-17 - 0.5
    assert v[2] == 0x28B7 / 2**16 + 2**-17 - 0.5  # fmix32(1) is 0x514E28B7
    assert v[3] == 0x514E / 2**16 + 2**-17 - 0.5
    assert np.abs(oracle.dither_of(5, 4096)).max() < 0.5


@both
def test_the_mean_is_right(ops):
    """Codes of N seeds have the mean x / s: each is one of two neighbours, so the deviation of the
    mean is at most s / (2 sqrt N), and 6 of those are exceeded once in 10^9."""
    layout, N = BlockLayout(numel=256, bits=4, block=64), 4000
    x = torch.linspace(-1, 1, 256)[None] * 7  # a scale of 1 in the outer blocks
    x[0, ::64] = 7.0
    message = dithered(ops, x.expand(N, -1).contiguous(), layout, list(range(N)))
    mean = dequantize(ops, message[None], layout, divisor=N)[0]
    assert (mean - x[0]).abs().max() <= 6 / (2 * math.sqrt(N)) + 2**-16
    # To nearest, it would be off by nearly half a step somewhere, however many are added up.
    nearest = torch.empty(1, layout.words, dtype=torch.int32)
    ops.quantize(x, None, nearest, layout=layout, average=0.0)
    assert (dequantize(ops, nearest[None], layout)[0] - x[0]).abs().max() > 0.4


@both
def test_the_largest_of_a_block_is_not_clipped(ops):
    """A scale rounded to nearest would be too small for half of these, by up to 2^-9: their codes
    would be 7, whatever the dither, and the mean of 4000 too small."""
    N = 4000
    layout = BlockLayout(numel=32 * 64, bits=4, block=32)
    x = torch.zeros(64, 32)
    x[:, 3] = torch.linspace(7, 8, 64)
    message = dithered(ops, x.reshape(1, -1).expand(N, -1).contiguous(), layout, list(range(N)))
    mean = dequantize(ops, message[None], layout, divisor=N)[0].view(64, 32)[:, 3]
    # A step is missed with a chance of at most 7 * 2^-7, so deviations are below 0.23 steps of 8/7.
    assert (mean - x[:, 3]).abs().max() <= 6 * 0.23 * 8 / 7 / math.sqrt(N)


@both
def test_what_codes_can_say_is_not_touched(ops):
    layout = BlockLayout(numel=64, bits=8, block=64)
    x = torch.arange(-63.0, 65.0, 2.0)[None]
    x[0, 0], x[0, 5] = 127.0, 0.0
    message = dithered(ops, x.expand(50, -1).contiguous(), layout, list(range(50)))
    assert torch.equal(dequantize(ops, message[:, None], layout), x.expand(50, -1))


def test_rows_and_seeds_have_nothing_in_common():
    seeds = np.array([oracle.dither_of(seed, 4096) for seed in (0, 1, 2, 1000, -1)])
    correlation = np.corrcoef(seeds)
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 6 / math.sqrt(4096)
