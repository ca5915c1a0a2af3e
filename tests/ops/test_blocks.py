"""Block quantization: the format, the reference against the oracle, and what holds for all.

Every tensor is a slice of a wider buffer; outputs are poisoned.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import oracle
from support.block_cases import (
    BF16,
    CPU,
    F16,
    F32,
    OPS,
    REFERENCE,
    SIZES,
    VARIANTS,
    Case,
    both,
    dequantize,
    make_case,
    quantize,
    variants,
)
from support.marks import named, slow
from tagc.ops.blocks import BITS, MIN_SCALE, BlockLayout
from tagc.ops.cpu import blocks as cpu_blocks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"numel": -1, "bits": 4}, "numel must not be negative, got -1"),
        ({"numel": 1, "bits": 2}, r"bits must be one of \(4, 8\), got 2"),
        ({"numel": 1, "bits": 16}, r"bits must be one of \(4, 8\), got 16"),
        ({"numel": 1, "bits": 4, "block": 16}, r"in \[32, 4096\], got 16"),
        ({"numel": 1, "bits": 4, "block": 8192}, r"in \[32, 4096\], got 8192"),
        ({"numel": 1, "bits": 4, "block": 48}, "a power of two .*, got 48"),
    ],
)
def test_layouts_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockLayout(**arguments)


@both
def test_a_message_written_out(ops):
    """Neighbours lie in neighbouring words: with ``bits=8, block=32``, element 8 i + j is byte i
    of word j. The scale of 1.0 = 127 / 127 is 0x3F80."""
    layout = BlockLayout(numel=33, bits=8, block=32)
    grad = torch.zeros(1, 33)
    grad[0, :5] = torch.tensor([127.0, -1.0, 2.5, 3.5, 0.5])
    grad[0, 8], grad[0, 17], grad[0, 24], grad[0, 32] = 5.0, 6.0, -127.0, -254.0
    message = oracle.poisoned(1, layout.words, dtype=torch.int32)
    ops.quantize(grad, None, message, layout=layout, average=0.0)
    words = [w & oracle.MASK for w in message[0].tolist()]
    assert words[0] == 0x4000_3F80  # the scales 1 and 2
    assert words[1:9] == [0x81_00_05_7F, 0x00_06_00_FF, 0x02, 0x04, 0x00, 0x00, 0x00, 0x00]
    assert words[9:] == [0x81, 0, 0, 0, 0, 0, 0, 0]


# The CPU's with residuals in float32 are compiled for two of them.
by_bits = pytest.mark.parametrize(
    ("bits", "ops"),
    [
        (bits, ops) if ops is not CPU or bits in (4, 8) else slow(bits, ops)
        for bits in BITS
        for ops in OPS
    ],
    ids=named,
)


def expected_residual(row: oracle.Quantized, before: Tensor, average: float) -> Tensor:
    left = row.left
    if average:
        kept, fresh = np.float32(average), np.float32(1 - average)
        left = kept * before.float().numpy() + fresh * left
    if before.dtype == BF16:
        largest = np.float32(torch.finfo(BF16).max)
        left = np.clip(oracle.to_bfloat16(left), -largest, largest)
    return torch.where(torch.from_numpy(row.bad), before, torch.from_numpy(left).to(before.dtype))


@pytest.mark.parametrize("average", [0.0, 0.3])
@variants
def test_quantizes_by_the_contract(bits, grad_dtype, residual_dtype, average):
    rng = np.random.default_rng(0)
    variant = bits, grad_dtype, residual_dtype
    for n, spoilt in itertools.product(SIZES, (False, True)):
        case = make_case(n, 2, 32 if n < 100 else 128, variant, rng, spoilt=spoilt)
        message, residual = quantize(REFERENCE, case, average)
        for r, x in enumerate(case.x.numpy()):
            row = oracle.quantize_row(x, bits, case.layout.block)
            assert message[r].tolist() == row.words
            if residual is not None and case.residual is not None:
                assert torch.equal(residual[r], expected_residual(row, case.residual[r], average))
                assert bool(residual.isfinite().all())


@pytest.mark.parametrize("divisor", [1, 3])
@variants
def test_dequantizes_by_the_contract(bits, grad_dtype, residual_dtype, divisor):
    rng = np.random.default_rng(1)
    variant = bits, grad_dtype, residual_dtype
    for n in SIZES:
        case = make_case(n, 3, 64, variant, rng, spoilt=n == SIZES[-1])
        message, _ = quantize(REFERENCE, case)
        total = np.zeros(n, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for x in case.x.numpy():
                row = oracle.quantize_row(x, bits, 64)
                total = total + oracle.elements_of(row, n).astype(np.float32)
            total = total / np.float32(divisor)
        out = dequantize(REFERENCE, message[None], case.layout, grad_dtype, divisor)
        assert oracle.same_values(out[0], torch.from_numpy(total).to(grad_dtype))


@both
def test_messages_are_added_in_their_order(ops):
    """(2^26 - 2^26) + 1 is 1, but (1 - 2^26) + 2^26 is 0."""
    layout = BlockLayout(numel=32, bits=8, block=32)
    x = 127 * torch.tensor([2.0**26, -(2.0**26), 1.0])[:, None].expand(3, 32)
    message, out = torch.empty(3, layout.words, dtype=torch.int32), torch.empty(1, 32)
    ops.quantize(x, None, message, layout=layout, average=0.0)
    ops.dequantize(message[None], out, layout=layout, divisor=1)
    assert bool((out == 127).all())


@by_bits
def test_what_is_not_finite_shows_and_stays_out_of_the_residual(bits, ops):
    """In its block only; a sum of finite numbers that overflows counts, too."""
    for where, value, old in ((70, math.nan, 0.5), (70, -math.inf, 0.5), (99, 3e38, 3e38)):
        grad, residual = torch.ones(2, 100), torch.full((2, 100), 0.5)
        grad[1, where], residual[1, where] = value, old
        case = Case(grad, residual, BlockLayout(numel=100, bits=bits, block=32))
        message, left = quantize(ops, case)
        block = torch.zeros(2, 100, dtype=torch.bool)
        block[1, where // 32 * 32 : where // 32 * 32 + 32] = True
        assert left is not None
        assert bool(left.isfinite().all())
        assert oracle.same_bits(left[block], residual[block])
        assert not torch.equal(left[~block], residual[~block])
        for dtype in (F32,) if ops is CPU else (F32, BF16, F16):
            out = dequantize(ops, message[None], case.layout, dtype)
            assert torch.equal(out[0].isnan(), block[1])


@by_bits
def test_the_ends_of_the_range(bits, ops):
    """Below ``MIN_SCALE`` nothing is sent and all stays; the largest numbers do not overflow."""
    layout, levels = BlockLayout(numel=64, bits=bits, block=32), 2 ** (bits - 1) - 1
    for top in (1e-45, MIN_SCALE * levels * 0.99, MIN_SCALE * levels, 1.0, 3.4028234663852886e38):
        grad, residual = torch.zeros(1, 64), torch.zeros(1, 64)
        grad[0, :4] = torch.tensor([top, -top, -0.0, top / 2])
        case = Case(grad, residual, layout)
        message, left = quantize(ops, case)
        sent = dequantize(ops, message[None], layout)
        assert left is not None
        assert bool((left + sent).isfinite().all())
        assert torch.equal(left.double() + sent.double(), grad.double())
        assert bool(sent.any()) == (top >= MIN_SCALE * levels)
        # bfloat16 of the scale, and half a step.
        assert top < MIN_SCALE * levels or float(left.abs().max()) <= top * (2**-8 + 0.5 / levels)


values_ = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-4, 4, width=32),
    st.just(-0.0),
)


FORMS = [(4, BF16), *((bits, F32) for bits in BITS)]
COMPILED = [(4, BF16), (8, F32)]


@pytest.mark.parametrize(
    ("ops", "forms"),
    [(REFERENCE, FORMS), (CPU, COMPILED), slow(CPU, FORMS)],
    ids=["reference", "cpu", "cpu, all"],
)
@given(
    pairs=st.lists(st.tuples(values_, values_), min_size=1, max_size=80),
    which=st.integers(0, 59),
)
@settings(deadline=None, max_examples=80, derandomize=True)
def test_what_is_sent_plus_what_stays_is_what_was_there(ops, forms, pairs, which):
    """To the last bit; a bfloat16 residual is off by its rounding, half of 2**-7."""
    bits, dtype = forms[which % len(forms)]
    grad, residual = (torch.tensor(pairs).T.contiguous()[:, None] / 4).unbind(0)
    residual = residual.to(dtype).clamp(-1e38, 1e38)
    case = Case(grad, residual, BlockLayout(numel=len(pairs), bits=bits, block=32))
    message, left = quantize(ops, case)
    assert left is not None
    sent = dequantize(ops, message[None], case.layout).double()
    exact = case.x.double() - sent
    if dtype == F32:
        assert torch.equal(left.double(), exact)
    else:
        off = (left.double() - exact).abs()
        assert bool((off <= exact.abs() * 2.0**-8 + 2.0**-134).all())


@both
def test_a_running_average(ops):
    """LoCo: a share of the old residual stays, the rest is this step's error."""
    grad = torch.zeros(1, 32)
    grad[0, 0], grad[0, 1] = 7.0, 0.25
    residual = torch.zeros(1, 32)
    residual[0, 1] = 1.0
    # The scale is 1; x is 7 and 1.25, of which 7 and 1 are sent.
    case = Case(grad, residual, BlockLayout(numel=32, bits=4, block=32))
    _, left = quantize(ops, case, 0.75)
    assert left is not None
    assert left[0, :3].tolist() == [0.0, 0.75 * 1.0 + 0.25 * 0.25, 0.0]


@pytest.mark.parametrize(("bits", "grad_dtype", "residual_dtype"), VARIANTS[:3])
def test_prepared_is_compiled(bits, grad_dtype, residual_dtype):
    case = make_case(100, 2, 64, (bits, grad_dtype, residual_dtype), np.random.default_rng(4))
    kernels = (cpu_blocks._quantize_row, cpu_blocks._dequantize_row)
    CPU.prepare_blocks(case.layout, grad_dtype, residual_dtype, 0.5)
    before = [len(kernel.signatures) for kernel in kernels]
    message, _ = quantize(CPU, case, 0.5)
    dequantize(CPU, message[None], case.layout, grad_dtype, 2)
    assert [len(kernel.signatures) for kernel in kernels] == before
