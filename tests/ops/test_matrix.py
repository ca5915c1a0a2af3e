"""Codec `matrix`: the format, the operators against the oracle, the CPU against the reference.

Every tensor is a slice of a wider buffer; outputs are poisoned.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import matrix_oracle, oracle
from tagc.matrix import MatrixLayout, shard_shape
from tagc.ops import get_ops
from tagc.ops.cpu import matrices

OPS = CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
both = pytest.mark.parametrize("ops", OPS, ids=["cpu", "reference"])
SIZES = [(1, 1), (2, 1), (4, 1), (1, 8), (1, 16), (1, 32)]
sizes = pytest.mark.parametrize(("bits", "group"), SIZES)
# bits, group, gradient, residual: each but those of float16, which the CPU widens first, costs a
# compilation. Groups of 8 have codes of 4 bits, and share most of it with those.
VARIANTS = [
    (1, 1, F32, F32),
    (1, 1, BF16, BF16),
    (2, 1, F32, BF16),
    (2, 1, F16, BF16),
    (4, 1, BF16, F32),
    (1, 8, BF16, F32),
    (1, 16, F32, F32),
    (1, 16, F32, None),
    (1, 32, F32, BF16),
    (1, 32, F16, BF16),
]
variants = pytest.mark.parametrize(
    ("bits", "group", "grad_dtype", "residual_dtype"),
    VARIANTS,
    ids=lambda v: str(v).removeprefix("torch."),
)
SHAPES = [(1, 1), (3, 1), (1, 33), (5, 8), (9, 40), (4, 129)]


@dataclass
class Case:
    """Arguments of a quantization."""

    grad: Tensor
    residual: Tensor | None
    layout: MatrixLayout

    @property
    def x(self) -> Tensor:
        """`[D, rows, columns]`."""
        x = self.grad.float()
        if self.residual is not None:
            x = x + self.residual.float()
        return x.unflatten(-1, (self.layout.rows, self.layout.columns))


def matrices_of(D: int, rows: int, columns: int, rng: np.random.Generator) -> Tensor:
    """Rows and columns of sizes of their own, some of them zero, others far from the rest."""
    x = oracle.values((D, rows, columns), rng).double().numpy()
    for shape, far in (((D, rows, 1), 90), ((D, 1, columns), 30)):
        octave = rng.integers(-4, 5, shape) + (rng.random(shape) < 0.1) * rng.integers(-far, far)
        x = np.ldexp(x, octave) * (rng.random(shape) > 0.1)
    return torch.from_numpy(np.clip(x, -3e38, 3e38).astype(np.float32))


def make_case(shape, D, variant, rng, *, level=1.0, spoilt=False) -> Case:
    bits, group, grad_dtype, residual_dtype = variant
    rows, columns = shape
    layout = MatrixLayout(rows=rows, columns=columns, bits=bits, group=group, level=level)
    grad = matrices_of(D, rows, columns, rng)
    residual = None
    if residual_dtype is not None:
        residual = (matrices_of(D, rows, columns, rng) / 4).to(residual_dtype).flatten(1)
    if spoilt:
        for value in (math.nan, math.inf, -math.inf, 3.4028234e38, -3.4028234e38, 1e-45, -0.0):
            grad[rng.integers(D), rng.integers(rows), rng.integers(columns)] = value
    elif grad_dtype == F16:
        grad = grad.clamp(-60000, 60000)
    return Case(
        oracle.widened(grad.to(grad_dtype).flatten(1)),
        None if residual is None else oracle.widened(residual),
        layout,
    )


def quantize(ops, case: Case, average=0.0) -> tuple[Tensor, Tensor | None]:
    """The message and the residual after."""
    residual = None if case.residual is None else oracle.widened(case.residual)
    message = oracle.poisoned(case.grad.shape[0], case.layout.words, dtype=torch.int32)
    message = oracle.widened(message)
    before = case.grad.clone()
    ops.quantize_matrix(case.grad, residual, message, layout=case.layout, average=average)
    oracle.check_margins(message, residual)
    assert oracle.same_bits(case.grad, before)
    return message, residual


def dequantize(ops, message: Tensor, layout: MatrixLayout, dtype=F32, divisor=1) -> Tensor:
    out = oracle.widened(oracle.poisoned(layout.numel, dtype=dtype))
    ops.dequantize_matrix(message, out, layout=layout, divisor=divisor)
    oracle.check_margins(out)
    return out


# The format


def test_words_of_a_layout():
    layout = MatrixLayout(rows=5, columns=70, bits=2)
    assert (layout.numel, layout.width, layout.codes, layout.row_words) == (350, 2, 70, 5)
    assert layout.head == (1, 9, 2)
    assert layout.words == 1 + 9 + 2 + 5 * 5
    grouped = MatrixLayout(rows=5, columns=70, group=16)
    # Six codes of 5 bits in a word; five groups in a row, the last of 6 elements.
    assert (grouped.width, grouped.codes, grouped.row_words) == (5, 5, 1)
    assert MatrixLayout(rows=1, columns=7 * 16, group=16).row_words == 2
    assert MatrixLayout(rows=0, columns=5).words == 0


@pytest.mark.parametrize(
    ("bits", "group", "per_element"),
    [(4, 1, 4), (2, 1, 2), (1, 1, 1), (1, 8, 1 / 2), (1, 16, 1 / 3), (1, 32, 1 / 5)],
)
def test_bits_per_element_of_large_matrices(bits, group, per_element):
    """Of 6 codes a word at 5 bits, and 5 at 6; scales are little beside."""
    layout = MatrixLayout(rows=4096, columns=15 * 1024, bits=bits, group=group)
    assert 32 * layout.words / layout.numel == pytest.approx(per_element, abs=0.002)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": -1, "columns": 1}, "a matrix has columns, got -1 x 1"),
        ({"rows": 1, "columns": 0}, "a matrix has columns, got 1 x 0"),
        ({"rows": 1, "columns": 1, "bits": 3}, r"bits must be one of \(1, 2, 4\), got 3"),
        ({"rows": 1, "columns": 1, "group": 4}, r"one of \(1, 8, 16, 32\), got 4"),
        ({"rows": 1, "columns": 1, "group": 8, "bits": 2}, "a group of 8, bits must be 1, got 2"),
        ({"rows": 1, "columns": 1, "level": 4.0}, r"in \[0.25, 4\), got 4.0"),
        ({"rows": 1, "columns": 1, "level": math.nan}, r"in \[0.25, 4\), got nan"),
    ],
)
def test_layouts_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        MatrixLayout(**arguments)


def test_rows_and_columns_of_a_shard():
    assert shard_shape((7, 5), 0, 4 * 5) == (4, 5)
    assert shard_shape((7, 6), 1, 7 * 3) == (7, 3)
    assert shard_shape((7, 3, 2), 0, 4 * 6) == (4, 6)
    assert shard_shape((7, 4, 2), 1, 7 * 2 * 2) == (7, 4)
    assert shard_shape((7, 4, 2), 2, 7 * 4) == (7, 4)
    for shape, dim in itertools.product(((0, 5), (5, 0)), (0, 1)):
        rows, columns = shard_shape(shape, dim, 0)
        assert rows * columns == 0
        assert columns


@both
def test_a_message_written_out(ops):
    """Of three rows and three columns, whose sums are 8, 6 and 0: scales 1, 0.75 and 2**-7 * 0.75.

    The largest row mean is 7 / (1.75 + 2**-7 * 0.75), which is 3.99, in the octave of 2: its
    biased exponent is 128. Bits of 4.0, the upper 12 of them, are 0x408 = 1032.
    """
    layout = MatrixLayout(rows=3, columns=3)
    grad = torch.tensor([[4.0, -3, 0, -4, 3, 0, 0, 0, 0]])
    message = oracle.widened(oracle.poisoned(1, layout.words, dtype=torch.int32))
    ops.quantize_matrix(grad, None, message, layout=layout, average=0.0)
    base = 8 * 128 - 200
    # The fit is (4 * 1 + 3 * 0.75) / (1 + 0.75**2 + (2**-7 * 0.75)**2), nearest to 4.0.
    byte = 0x408 - base
    assert message[0].tolist() == [
        base,
        15 | 14 << 4 | 0 << 8,
        byte | byte << 8 | 0 << 16,
        # Three codes of 1 bit in a word a row is one each: in three words they would be neighbours.
        0b010,
        0b001,
        0b000,
    ]
    out = dequantize(ops, message, layout)
    f = 2.0**-7 * 3
    assert out.tolist() == [4.0, -3.0, f, -4.0, 3.0, f, 0.0, 0.0, 0.0]


@both
def test_a_message_of_groups_written_out(ops):
    """Seven groups of 16 and six codes a word: code ``2 i + j`` is in place i of word j."""
    layout = MatrixLayout(rows=1, columns=7 * 16, group=16)
    grad = torch.ones(1, layout.columns)
    places = [3, 0, 15, 7, 1, 2, 9]
    for t, place in enumerate(places):
        grad[0, 16 * t + place] = -1.125 if t % 2 else 1.125
    message = oracle.poisoned(1, layout.words, dtype=torch.int32)
    ops.quantize_matrix(grad, None, message, layout=layout, average=0.0)
    codes = [place + 16 * (t % 2) for t, place in enumerate(places)]
    words = [w & oracle.MASK for w in message[0].tolist()]
    # All columns have scale 1, and the row's is 1.125: the mean 1.0 and a bit has exponent 127.
    assert words[0] == 8 * 127 - 200
    assert words[1:15] == [0xFFFF_FFFF] * 14
    assert words[15] == 0x3F9 - words[0]
    assert words[16] == codes[0] | codes[2] << 5 | codes[4] << 10 | codes[6] << 15
    assert words[17] == codes[1] | codes[3] << 5 | codes[5] << 10
    out = dequantize(ops, message, layout)
    assert torch.equal(out, torch.where(grad[0].abs() == 1.125, grad[0], 0.0))


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


@both
@variants
def test_quantizes_by_the_contract(bits, group, grad_dtype, residual_dtype, ops):
    rng = np.random.default_rng(bits + group)
    variant = bits, group, grad_dtype, residual_dtype
    for shape, spoilt in itertools.product(SHAPES, (False, True)):
        level, average = float(rng.choice([0.5, 1.0, 1.3, 2.0])), float(rng.choice([0.0, 0.3]))
        case = make_case(shape, 2, variant, rng, level=level, spoilt=spoilt)
        message, residual = quantize(ops, case, average)
        for d, x in enumerate(case.x.numpy()):
            found = matrix_oracle.quantize(x, case.layout)
            assert message[d].tolist() == found.words
            if residual is not None and case.residual is not None:
                expected = expected_residual(found, case.residual[d], average)
                assert oracle.same_bits(residual[d], expected)
                assert bool(residual.isfinite().all())


@both
@pytest.mark.parametrize("bits", [2, 4])
def test_quotients_round_as_the_contract_says(bits, ops):
    """Of numbers at the ends of a code's interval, where one rounding less gives another code."""
    rng = np.random.default_rng(3)
    layout, D = MatrixLayout(rows=8, columns=12, bits=bits), 40
    scale = rng.integers(8, 16, (D, 8, 1)) * rng.choice([1.0, 0.75], (D, 1, 12))
    x = (rng.integers(-8, 9, (D, 8, 12)) * scale).astype(np.float32)
    message = oracle.poisoned(D, layout.words, dtype=torch.int32)
    grad = torch.from_numpy(x).flatten(1)
    ops.quantize_matrix(grad, None, message, layout=layout, average=0.0)
    for words, one in zip(message.tolist(), x, strict=True):
        found = matrix_oracle.quantize(one, layout)
        assert words == found.words


# Added one at a time to the first of these, ones are lost; added up before, they reach the next
# scale: 1.25 and 1.0625 times 2**24 are halfway between two.
ALMOST = {"column": 1.25 * 2**24 - 4, "row": 1.0625 * 2**24 - 4}


@both
@pytest.mark.parametrize(
    ("of", "ones"),
    [
        ("column", [8, 16, 24, 32, 40, 48]),
        ("column", [1, 3, 5, 7]),
        ("row", [32, 64, 96, 128, 160, 192]),
        ("row", [1, 2, 17, 18]),
    ],
    ids=["lane of a column", "lanes of a column", "lane of a row", "lanes of a row"],
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
    message = oracle.poisoned(1, layout.words, dtype=torch.int32)
    ops.quantize_matrix(x.view(1, -1), None, message, layout=layout, average=0.0)
    found = matrix_oracle.quantize(x.numpy(), layout)
    assert message[0].tolist() == found.words
    if of == "column":
        assert message[0, 1] & 0xFF == 15 << 4 | 13  # 0.5 and 1
    else:
        scale = found.said[0, 0]
        assert scale == 2.0**16


@pytest.mark.parametrize("divisor", [1, 3])
@both
@variants
def test_dequantizes_by_the_contract(bits, group, grad_dtype, residual_dtype, ops, divisor):
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
        out = dequantize(ops, message, case.layout, grad_dtype, divisor)
        assert oracle.same_values(out, total.to(grad_dtype))


@variants
def test_cpu_is_the_reference_to_the_bit(bits, group, grad_dtype, residual_dtype):
    rng = np.random.default_rng(2)
    variant = bits, group, grad_dtype, residual_dtype
    shapes = [(0, 5), (1, 1), (2, 1030), (31, 7), (65, 64), (40, 257)]
    for shape, average, spoilt in itertools.product(shapes, (0, 0.7), (False, True)):
        case = make_case(shape, 3, variant, rng, level=1.3, spoilt=spoilt and shape[0] > 0)
        (fast, left), (slow, owed) = (quantize(ops, case, average) for ops in (CPU, REFERENCE))
        assert torch.equal(fast, slow)
        if left is not None and owed is not None:
            assert oracle.same_bits(left, owed)
        for messages in (fast[:1], fast):
            outs = [dequantize(ops, messages, case.layout, grad_dtype, 3) for ops in OPS]
            assert oracle.same_values(*outs)


@both
@sizes
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
    case = Case(narrow, None, MatrixLayout(rows=1, columns=8, bits=bits, group=group))
    (fast, _), (slow, _) = (quantize(each, case) for each in OPS)
    assert torch.equal(fast, slow)


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


@both
@sizes
def test_what_is_not_finite_shows_in_its_row_and_stays_out_of_the_residual(bits, group, ops):
    """A sum of finite numbers that overflows counts, too; columns' scales change, no more."""
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
        for dtype in (F32, BF16, F16):
            assert torch.equal(dequantize(ops, message, layout, dtype).isnan(), row[1])


@both
def test_nothing_is_sent_of_what_is_too_small(ops):
    """The largest row mean is `2**-60` or nothing is sent; other rows reach 24 octaves below."""
    layout = MatrixLayout(rows=4, columns=8)
    for mean, sends in ((2.0**-60, True), (2.0**-60 * 0.999, False), (0.0, False), (2.0**63, True)):
        grad = torch.full((4, 8), mean)
        grad[1] *= 2.0**-24
        grad[2] *= 2.0**-26
        grad[3] = 0.0
        case = Case(grad.view(1, -1), torch.zeros(1, 32), layout)
        message, left = quantize(ops, case)
        out = dequantize(ops, message, layout)
        assert left is not None
        assert torch.equal(out + left[0], grad.flatten())
        assert out.view(4, 8).any(-1).tolist() == [sends, sends, False, False]


# Properties

values_ = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-4, 4, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0]),
)


@both
@given(
    pairs=st.lists(st.tuples(values_, values_), min_size=1, max_size=80),
    rows=st.integers(1, 6),
    size=st.sampled_from(SIZES),
    level=st.sampled_from([0.5, 1.0, 2.0]),
)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_what_is_sent_plus_what_stays_is_what_was_there(ops, pairs, rows, size, level):
    """Within half a unit in the last place of what stays; to the bit where no code points."""
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


@both
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(2, 6), st.integers(1, 70)),
    size=st.sampled_from(SIZES),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_a_row_that_is_not_finite_is_alone(ops, seed, shape, size, bad):
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


@both
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 90)),
    size=st.sampled_from([s for s in SIZES if s[0] == 1]),
    level=st.sampled_from([0.5, 1.0]),
)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_what_stays_of_a_row_is_no_more_than_the_row(ops, seed, shape, size, level):
    """Where codes have one size: a fit's energy is `(2 - s) s` of it, with `s` the level times at
    most 1 + 2**-4 by rounding, and never negative. What is left of a row of equal magnitudes is
    little."""
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


@both
@sizes
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


@pytest.mark.parametrize(("bits", "group", "grad_dtype", "residual_dtype"), VARIANTS[4:7])
def test_prepared_is_compiled(bits, group, grad_dtype, residual_dtype):
    rng = np.random.default_rng(4)
    case = make_case((3, 70), 2, (bits, group, grad_dtype, residual_dtype), rng)
    kernels = (matrices.quantize_columns, matrices.quantize_rows, matrices.dequantize_rows)
    CPU.prepare_matrix(case.layout, grad_dtype, residual_dtype, 0.5)
    before = [len(kernel.signatures) for kernel in kernels]
    message, _ = quantize(CPU, case, 0.5)
    dequantize(CPU, message, case.layout, grad_dtype, 2)
    assert [len(kernel.signatures) for kernel in kernels] == before
