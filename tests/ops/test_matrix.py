"""Codec `matrix`: the format, the reference against the oracle, and where it gets tight.

Every tensor is a slice of a wider buffer; outputs are poisoned.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from support import matrix_oracle, oracle
from support.marks import slow
from support.matrix_cases import (
    BF16,
    CPU,
    F16,
    F32,
    RARER,
    REFERENCE,
    SHAPES,
    VARIANTS,
    Case,
    both,
    dequantize,
    make_case,
    quantize,
    sizes_on_both,
    variants,
)
from tagc.ops.cpu import matrix as kernels
from tagc.ops.matrix import MatrixLayout

# Against the contract


def expected_residual(found: matrix_oracle.Quantized, before: Tensor, average: float) -> Tensor:
    left = found.left.reshape(-1)
    if average:
        kept, fresh = np.float32(average), np.float32(1 - average)
        left = kept * before.float().numpy() + fresh * left
    bad = torch.from_numpy(np.repeat(found.bad, found.left.shape[1]))
    if before.dtype == BF16:
        largest = np.float32(torch.finfo(BF16).max)
        with np.errstate(invalid="ignore"):
            left = np.clip(oracle.to_bfloat16(left), -largest, largest)
    return torch.where(bad, before, torch.from_numpy(left).to(before.dtype))


@variants
def test_quantizes_by_the_contract(bits, group, grad_dtype, residual_dtype):
    rng = np.random.default_rng(bits + group)
    variant = bits, group, grad_dtype, residual_dtype
    for shape, spoilt in itertools.product(SHAPES, (False, True)):
        level, average = float(rng.choice([0.5, 1.0, 1.3, 2.0])), float(rng.choice([0.0, 0.3]))
        case = make_case(shape, 2, variant, rng, level=level, spoilt=spoilt)
        message, residual = quantize(REFERENCE, case, average)
        for d, x in enumerate(case.x.numpy()):
            found = matrix_oracle.quantize(x, case.layout)
            assert message[d].tolist() == found.words
            if residual is not None and case.residual is not None:
                expected = expected_residual(found, case.residual[d], average)
                assert oracle.same_bits(residual[d], expected)
                assert bool(residual.isfinite().all())


def test_quotients_round_as_the_contract_says():
    """Of numbers at the ends of a code's interval, where one rounding less gives another code."""
    rng = np.random.default_rng(3)
    layout, D = MatrixLayout(rows=8, columns=12, bits=2), 20
    scale = rng.integers(8, 16, (D, 8, 1)) * rng.choice([1.0, 0.75], (D, 1, 12))
    x = (rng.integers(-8, 9, (D, 8, 12)) * scale).astype(np.float32)
    message = oracle.poisoned(D, layout.words, dtype=torch.int32)
    grad = torch.from_numpy(x).flatten(1)
    REFERENCE.quantize_matrix(grad, None, message, layout=layout, average=0.0)
    fast = oracle.poisoned(D, layout.words, dtype=torch.int32)
    CPU.quantize_matrix(grad, None, fast, layout=layout, average=0.0)
    assert torch.equal(fast, message)
    for words, one in zip(message.tolist(), x, strict=True):
        found = matrix_oracle.quantize(one, layout)
        assert words == found.words


def test_rows_longer_than_a_table():
    """Which are summed in chunks of words."""
    rng = np.random.default_rng(7)
    for bits, group, columns in ((1, 1, 4097), (2, 1, 4200), (1, 8, 4103)):
        case = make_case((2, columns), 1, (bits, group, F32, BF16), rng, level=1.0, spoilt=False)
        assert case.layout.row_words > case.layout.word_lanes
        message, _ = quantize(REFERENCE, case)
        assert torch.equal(quantize(CPU, case)[0], message)
        assert message[0].tolist() == matrix_oracle.quantize(case.x[0].numpy(), case.layout).words


# Added one at a time to the first of these, ones are lost; added up before, they reach the next
# scale: 1.25 and 1.0625 times 2**24 are halfway between two.
ALMOST = {"column": 1.25 * 2**24 - 4, "row": 1.0625 * 2**24 - 4}


@both
@pytest.mark.parametrize(
    ("of", "ones"),
    [
        ("column", [8, 16, 24, 32, 40, 48]),
        ("column", [1, 3, 5, 7]),
        # 32 places of 8 words: neighbours, then halves.
        ("row", [1, 2, 4, 128, 64, 32, 16, 8]),
        ("row", [4, 5, 6, 7]),
    ],
    ids=["lane of a column", "lanes of a column", "one by one in a row", "together in a row"],
)
def test_sums_add_up_in_the_order_of_the_format(of, ones, ops):
    layout = MatrixLayout(rows=50, columns=256)
    x = torch.zeros(50, 256)
    line = x[:, 0] if of == "column" else x[0]
    line[0] = ALMOST[of]
    line[ones] = 1.0
    if of == "column":
        x[0, 1:] = 2.0**25
    else:
        x[1] = 2.0**33  # columns of one size
    message, _ = quantize(ops, Case(x.view(1, -1), torch.zeros(1, x.numel()), layout))
    found = matrix_oracle.quantize(x.numpy(), layout)
    assert message[0].tolist() == found.words
    if of == "column":
        assert message[0, 1] & 0xFF == 15 << 4 | 13  # 0.5 and 1
    else:
        # Four of them reach the next scale if they meet before they meet the first.
        assert found.said[0, 0] == (1.125 if ones == [4, 5, 6, 7] else 1.0) * 2.0**16


@pytest.mark.some(8)
@pytest.mark.parametrize("divisor", [1, 3])
@variants
def test_dequantizes_by_the_contract(bits, group, grad_dtype, residual_dtype, divisor):
    rng = np.random.default_rng(1)
    variant = bits, group, grad_dtype, residual_dtype
    for shape in SHAPES:
        case = make_case(shape, 3, variant, rng, spoilt=shape == SHAPES[-1])
        message, _ = quantize(REFERENCE, case)
        total = None
        with np.errstate(over="ignore", invalid="ignore"):
            for x in case.x.numpy():
                said = matrix_oracle.quantize(x, case.layout).said.astype(np.float32)
                total = said if total is None else total + said
            assert total is not None
            total = torch.from_numpy(total / np.float32(divisor)).flatten()
        out = dequantize(REFERENCE, message, case.layout, grad_dtype, divisor)
        assert oracle.same_values(out, total.to(grad_dtype))


@sizes_on_both
def test_several_matrices_are_each_for_itself(bits, group, ops):
    rng = np.random.default_rng(5)
    for rows, columns in ((3, 40), (0, 5), (1, 1)):
        layout = MatrixLayout(rows=rows, columns=columns, bits=bits, group=group, count=3)
        cases = [make_case((rows, columns), 2, (bits, group, F32, F32), rng) for _ in range(3)]
        grads, residuals = zip(*((case.grad, case.residual) for case in cases), strict=True)
        together = Case(oracle.widened(torch.cat(grads, 1)), torch.cat(residuals, 1), layout)
        message, left = quantize(ops, together, 0.4)
        sent, owed = zip(*(quantize(ops, case, 0.4) for case in cases), strict=True)
        assert left is not None
        assert torch.equal(message, torch.cat(sent, 1))
        assert oracle.same_bits(left, torch.cat(owed, 1))
        out = oracle.widened(oracle.poisoned(2, layout.numel, dtype=F32))
        ops.dequantize_matrix(
            torch.stack([message, message.flip(0)]), out, layout=layout, divisor=3
        )
        oracle.check_margins(out)
        for k, found in enumerate(out):
            each = [dequantize(ops, (m, m.flip(0))[k], layout.one, F32, 3) for m in sent]
            assert oracle.same_values(found, torch.cat(each))


@sizes_on_both
def test_the_largest_numbers(bits, group, ops):
    """Of equal size but for the column's scale: quotients overflow, which is largest, too."""
    top = torch.finfo(F32).max
    grad = torch.ones(1, 9 * 32)
    grad[0, :4] = torch.tensor([top, -top, top / 2, 1e30])
    grad[0, 32:34] = torch.tensor([-top, top])
    case = Case(
        grad, torch.zeros_like(grad), MatrixLayout(rows=9, columns=32, bits=bits, group=group)
    )
    message, left = quantize(ops, case)
    found = matrix_oracle.quantize(case.x[0].numpy(), case.layout)
    assert message[0].tolist() == found.words
    assert left is not None
    assert bool(left.isfinite().all())
    # Column 1 is largest; in column 0 a quotient of exactly the largest number comes first.
    narrow = torch.tensor([[top, 0.9 * top, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    layout = MatrixLayout(rows=1, columns=8, bits=bits, group=group)
    case = Case(narrow, torch.zeros_like(narrow), layout)
    message, _ = quantize(ops, case)
    assert message[0].tolist() == matrix_oracle.quantize(narrow.numpy(), layout).words


@both
def test_without_a_residual_minus_zeros_keep_their_sign(ops):
    layout = MatrixLayout(rows=1, columns=16, group=8)
    grad = torch.ones(1, 16)
    grad[0, :8] = -0.0
    message = oracle.poisoned(1, layout.words, dtype=torch.int32)
    ops.quantize_matrix(grad, None, message, layout=layout, average=0.0)
    codes = int(message[0, sum(layout.head)])
    assert [codes & 15, codes >> 4 & 15] == [8, 0]


@both
def test_an_infinite_quotient_is_larger_than_the_largest_number(ops):
    """Columns of sizes 1 (made so by the second row) and small: 3e38 divided by the latter is
    infinite, and the group's code points there."""
    top = torch.finfo(F32).max
    grad = torch.zeros(2, 8)
    grad[0, 0], grad[0, 1], grad[1, 0] = top, 0.99 * top, 2.0**64
    layout = MatrixLayout(rows=2, columns=8, group=8)
    message = oracle.poisoned(1, layout.words, dtype=torch.int32)
    ops.quantize_matrix(grad.view(1, -1), None, message, layout=layout, average=0.0)
    found = matrix_oracle.quantize(grad.numpy(), layout)
    assert message[0].tolist() == found.words
    assert found.spoken[0].tolist() == [False, True, *[False] * 6]


@sizes_on_both
def test_what_is_not_finite_shows_in_its_row_and_stays_out_of_the_residual(bits, group, ops):
    """A sum of finite numbers that overflows counts, too; of other rows the columns' scales and the
    base change, no more."""
    for value, old in ((math.nan, 0.5), (-math.inf, 0.5), (3e38, 3e38)):
        grad, residual = torch.ones(2, 100), torch.full((2, 100), 0.5)
        grad[1, 47], residual[1, 47] = value, old
        layout = MatrixLayout(rows=5, columns=20, bits=bits, group=group)
        message, left = quantize(ops, Case(grad, residual, layout))
        row = torch.zeros(2, 100, dtype=torch.bool)
        row[1, 40:60] = True
        assert left is not None
        assert bool(left.isfinite().all())
        assert oracle.same_bits(left[row], residual[row])
        assert not torch.equal(left[~row], residual[~row])
        for dtype in (F32,) if ops is CPU else (F32, BF16, F16):
            assert torch.equal(dequantize(ops, message, layout, dtype).isnan(), row[1])


@both
def test_nothing_is_sent_of_what_is_too_small(ops):
    """The largest column's mean is `2**-60` or nothing is sent; rows reach 17 octaves below it."""
    layout = MatrixLayout(rows=4, columns=8)
    for mean, sends in ((2.0**-60, True), (2.0**-60 * 0.874, False), (0.0, False), (2.0**63, True)):
        grad = torch.full((4, 8), mean)
        grad[0] *= 4 - 2.0**-16 - 2.0**-18
        grad[1] *= 2.0**-16
        grad[2] *= 2.0**-18
        grad[3] = 0.0
        case = Case(grad.view(1, -1), torch.zeros(1, 32), layout)
        message, left = quantize(ops, case)
        out = dequantize(ops, message, layout)
        assert left is not None
        assert torch.equal(out + left[0], grad.flatten())
        assert out.view(4, 8).any(-1).tolist() == [sends, sends, False, False]


@pytest.mark.parametrize(
    ("bits", "group", "grad_dtype", "residual_dtype"),
    [VARIANTS[-1], *(slow(*variant) for variant in RARER if variant[1] == 8)],
)
def test_prepared_is_compiled(bits, group, grad_dtype, residual_dtype):
    rng = np.random.default_rng(4)
    case = make_case((3, 70), 2, (bits, group, grad_dtype, residual_dtype), rng)
    loops = (kernels._find_columns, kernels._quantize_rows, kernels._dequantize_rows)
    CPU.prepare_matrix(case.layout, grad_dtype, residual_dtype, 0.5)
    before = [len(kernel.signatures) for kernel in loops]
    message, _ = quantize(CPU, case, 0.5)
    dequantize(CPU, message, case.layout, grad_dtype, 2)
    assert [len(kernel.signatures) for kernel in loops] == before
