"""The operators: the reference against the oracle, and the CPU against the reference to the bit.

Every tensor is a slice of a wider buffer, as it is in a unit's messages; outputs are poisoned.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import oracle
from tagc.bitmap import from_bitmap, to_bitmap
from tagc.layout import SketchLayout, plan_layout
from tagc.ops import get_ops
from tagc.quantize import quantization_step
from tagc.symbols import SYMBOLS

CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# symbol, gradient, residual: every pair of a symbol and a dtype once or more. Each row but those
# with float16, which the CPU widens first, costs a compilation of seconds.
VARIANTS = [
    ("int8x4", F32, None),
    ("int8x4", F32, F32),
    ("int8x4", F16, F32),
    ("int8x4", BF16, BF16),
    ("int16x2", F32, BF16),
    ("int16x2", F16, BF16),
    ("int16x2", BF16, F32),
    ("int32x1", F32, F32),
    ("float32", F32, BF16),
    ("float32", BF16, None),
]
variants = pytest.mark.parametrize(
    ("symbol", "grad_dtype", "residual_dtype"),
    VARIANTS,
    ids=lambda v: str(v).removeprefix("torch."),
)
SIZES = [1, 2, 3, 31, 33, 127, 128, 129, 258]
LARGER = [1000, 4099]
# share of the groups above the threshold, share that the capacity holds
MODES = {
    "usual": (0.1, 0.12),
    "overflow": (0.4, 0.2),
    "nothing fits": (0.3, 0.0),
    "empty": (0.0, 0.1),
    "all above": (1.0, 0.5),
    "room for all": (0.2, 1.0),
}


@dataclass
class Case:
    """Arguments of an encode of ``W`` rows."""

    grad: Tensor
    residual: Tensor | None
    threshold: Tensor
    step: Tensor
    seed: Tensor
    layout: SketchLayout
    levels: int
    capacity: int
    support: Tensor | None = None


@dataclass
class Encoded:
    """Outputs of an encode."""

    index: Tensor
    cells: Tensor
    counts: Tensor
    residual: Tensor | None


def make_case(n, W, symbol, grad_dtype, residual_dtype, mode, rng, keys=None) -> Case:
    above, room = MODES[mode]
    symbol = SYMBOLS[symbol]
    grad = oracle.values((W, n), rng).to(grad_dtype)
    residual = None if residual_dtype is None else oracle.values((W, n), rng).to(residual_dtype)
    groups = -(-n // symbol.lanes)
    x = grad.float() if residual is None else grad.float() + residual.float()
    whole = torch.nn.functional.pad(x, (0, groups * symbol.lanes - n)).unflatten(1, (groups, -1))
    size = whole.abs().amax(-1).sort(1, descending=True).values
    threshold = size[:, min(groups - 1, round(above * groups))].clamp(min=2.0**-20)
    if mode == "empty":
        threshold = torch.full((W,), 2.0**20)
    levels = symbol.levels(W)
    capacity = int(room * groups)
    return Case(
        oracle.widened(grad),
        None if residual is None else oracle.widened(residual),
        threshold,
        quantization_step(threshold, symbol, levels),
        torch.from_numpy(rng.integers(-(2**31), 2**31, 1, dtype=np.int32)),
        plan_layout(n, symbol, W * capacity if keys is None else keys),
        levels,
        capacity,
    )


def encode(ops, case: Case) -> Encoded:
    W, layout = case.grad.shape[0], case.layout
    residual = None if case.residual is None else oracle.widened(case.residual)
    index = oracle.widened(oracle.poisoned(W, layout.index_words, dtype=torch.int32))
    cells = oracle.widened(oracle.poisoned(W, layout.cells, dtype=layout.symbol.dtype))
    counts = oracle.poisoned(W, 4, dtype=torch.int32)
    before = case.grad.clone()
    ops.encode(
        case.grad, residual, case.threshold, case.step, case.seed, index, cells, counts,
        layout=layout, levels=case.levels, capacity=case.capacity, support=case.support,
    )  # fmt: skip
    oracle.check_margins(residual, index, cells)
    assert oracle.same_bits(case.grad, before)
    return Encoded(index, cells, counts, residual)


def decode(ops, index, cells, case: Case, out_dtype, divisor):
    """``out``, the residual of row 0 after, ``stats``."""
    out = oracle.widened(oracle.poisoned(case.layout.numel, dtype=out_dtype))
    residual = None if case.residual is None else oracle.widened(case.residual[0])
    stats = oracle.poisoned(2, dtype=torch.int32)
    ops.decode(
        index, oracle.widened(cells), case.step[:1], case.seed, out, residual, stats,
        layout=case.layout, divisor=divisor,
    )  # fmt: skip
    oracle.check_margins(out, residual)
    return out, residual, stats


def spoil(case: Case, rng) -> None:
    """Non-finite gradients in row 0 only."""
    n = case.grad.shape[1]
    for bad in (float("nan"), float("inf"), float("-inf")):
        case.grad[0, int(rng.integers(n))] = bad


def check_against_oracle(case: Case, got: Encoded) -> None:
    layout = case.layout
    for d in range(case.grad.shape[0]):
        x = case.grad[d].float()
        if case.residual is not None:
            x = x + case.residual[d].float()
        support = None
        if case.support is not None:
            support = oracle.bits_of(case.support[d].numpy(), layout.groups)
        row = oracle.encode_row(
            x.numpy(), case.threshold[d].item(), case.step[d].item(), int(case.seed), layout,
            case.levels, case.capacity, support,
        )  # fmt: skip
        assert oracle.bits_of(got.index[d, :-1].numpy(), layout.words * 32) == row.present
        assert got.index[d, -1] == row.poison
        assert tuple(got.counts[d].tolist()) == row.counts
        if layout.symbol.integer:
            assert got.cells[d].tolist() == row.cells
        else:
            # At most `len(present)` float32 additions a cell.
            bound = len(row.present) * 2.0**-23 * float(x.nan_to_num(0, 0, 0).abs().sum())
            assert np.abs(got.cells[d].double().numpy() - row.cells).max(initial=0) <= bound
        if case.residual is not None and got.residual is not None:
            bf16 = case.residual.dtype == BF16
            left = torch.from_numpy(oracle.to_bfloat16(row.left) if bf16 else row.left)
            bad = torch.from_numpy(row.bad)
            expected = torch.where(bad, case.residual[d].float(), left)
            assert torch.equal(got.residual[d].float(), expected)


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


def same(a: Encoded, b: Encoded, symbol: str) -> None:
    assert torch.equal(a.index, b.index)
    assert torch.equal(a.counts, b.counts)
    if SYMBOLS[symbol].integer:
        assert torch.equal(a.cells, b.cells)
    else:  # float32 sums, in any order
        torch.testing.assert_close(a.cells, b.cells, rtol=1e-5, atol=1e-5)
    if a.residual is not None and b.residual is not None:
        assert oracle.same_bits(a.residual, b.residual)


@pytest.mark.parametrize("mode", MODES)
@variants
def test_cpu_encodes_like_the_reference(symbol, grad_dtype, residual_dtype, mode):
    rng = np.random.default_rng(1)
    for n, W in itertools.product(SIZES + LARGER, (1, 3)):
        case = make_case(n, W, symbol, grad_dtype, residual_dtype, mode, rng)
        same(encode(CPU, case), encode(REFERENCE, case), symbol)
        spoil(case, rng)
        same(encode(CPU, case), encode(REFERENCE, case), symbol)


def share(case: Case, rng, *, bad: bool = False) -> None:
    """A support of a third of the groups, zeros among them; ``bad`` makes some not finite."""
    W, groups, lanes = len(case.grad), case.layout.groups, case.layout.symbol.lanes
    marked = torch.from_numpy(rng.random((W, groups)) < 1 / 3)
    if bad:
        for at, value in ((0, float("nan")), (groups - 1, float("inf"))):
            marked[0, at] = True
            case.grad[0, at * lanes] = value
        # One outside of it, too, where there is room.
        if groups > 2:
            marked[0, 1] = False
            case.grad[0, lanes] = float("-inf")
    support = to_bitmap(marked)
    if groups % 32:
        support[:, -1] |= torch.tensor(-1 << groups % 32, dtype=torch.int32)  # means nothing
    case.support = oracle.widened(support)


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


@pytest.mark.parametrize("mode", ["usual", "nothing fits", "room for all"])
@variants
def test_cpu_encodes_a_support_like_the_reference(symbol, grad_dtype, residual_dtype, mode):
    rng = np.random.default_rng(7)
    for n, W, bad in itertools.product(SIZES + LARGER, (1, 3), (False, True)):
        case = make_case(n, W, symbol, grad_dtype, residual_dtype, mode, rng)
        share(case, rng, bad=bad)
        got = encode(CPU, case)
        same(got, encode(REFERENCE, case), symbol)
        if n in LARGER:  # more than what would fit
            assert bool((got.counts[:, 2] > case.capacity).all()) == (mode != "room for all")


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


def ranks_to_one(case: Case, ops=REFERENCE):
    """What rank 0 receives when every row of ``case`` is a rank's: index and summed cells."""
    got = encode(ops, case)
    return got.index, got.cells.sum(0, dtype=got.cells.dtype)


@pytest.mark.parametrize("keys", [None, 1])
@variants
def test_reference_decodes_by_the_contract(symbol, grad_dtype, residual_dtype, keys):
    rng = np.random.default_rng(3)
    for n in [*SIZES, 1001]:
        mode = "overflow" if keys is None else "room for all"
        case = make_case(n, 3, symbol, grad_dtype, residual_dtype, mode, rng, keys)
        layout, seed, step = case.layout, int(case.seed), case.step[0].item()
        index, cells = ranks_to_one(case)
        present = sorted(
            {k for row in index[:, :-1].numpy() for k in oracle.bits_of(row, layout.groups)}
        )
        peeled = oracle.peel(cells.tolist(), present, seed, layout)
        out, residual, stats = decode(REFERENCE, index, cells, case, grad_dtype, 3)
        assert stats.tolist() == [len(present), len(peeled.stuck)]
        found = {k: oracle.elements(v, step, layout) for k, v in peeled.values.items()}
        expected = oracle.shard(found, layout) / np.float32(3)
        expected = torch.from_numpy(expected).to(grad_dtype)
        if layout.symbol.integer:
            assert torch.equal(out, expected)
        else:  # the order of subtractions within a round is free
            torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-9)
        if residual is not None and case.residual is not None:
            add = oracle.estimate(peeled, seed, step, layout)
            after = (case.residual[0].double() + torch.from_numpy(add).double()).to(residual.dtype)
            close = {F32: 1e-6, BF16: 2.0**-7}[residual.dtype]
            torch.testing.assert_close(residual, after, rtol=close, atol=1e-6 * np.abs(add).max())
            assert bool((residual != case.residual[0]).any()) == bool(np.any(add))
    # The largest size overloads its table of one key, so that an estimate was checked.
    assert bool(peeled.stuck) == (keys == 1)


@pytest.mark.parametrize("keys", [None, 1, 60])
@variants
def test_cpu_decodes_like_the_reference(symbol, grad_dtype, residual_dtype, keys):
    rng = np.random.default_rng(4)
    for n, W in itertools.product(SIZES + LARGER, (1, 3)):
        mode = "overflow" if keys is None else "room for all"
        case = make_case(n, W, symbol, grad_dtype, residual_dtype, mode, rng, keys)
        index, cells = ranks_to_one(case)
        fast, slow = (decode(ops, index, cells, case, grad_dtype, W) for ops in (CPU, REFERENCE))
        assert torch.equal(fast[2], slow[2])
        if SYMBOLS[symbol].integer:
            assert oracle.same_bits(fast[0], slow[0])
            if fast[1] is not None and slow[1] is not None:
                assert oracle.same_bits(fast[1], slow[1])
        else:
            torch.testing.assert_close(fast[0], slow[0], rtol=1e-6, atol=1e-6)
            if fast[1] is not None:
                torch.testing.assert_close(fast[1], slow[1], rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_cpu_inserts_and_peels_like_the_reference(symbol):
    rng = np.random.default_rng(5)
    dtype = SYMBOLS[symbol].dtype
    for groups, keys, present in [(1, 1, 1), (33, 3, 20), (700, 50, 50), (5000, 100, 300)]:
        layout = plan_layout(groups * SYMBOLS[symbol].lanes, SYMBOLS[symbol], keys)
        seed = torch.from_numpy(rng.integers(-(2**31), 2**31, 1, dtype=np.int32))
        where = torch.zeros(groups, dtype=torch.bool)
        where[torch.from_numpy(oracle.support("uniform", groups, present, rng))] = True
        index = to_bitmap(where)
        # Absent entries are to be ignored. Small integers are exact in float32, too.
        symbols = torch.from_numpy(rng.integers(-1000, 1000, groups)).to(dtype)
        both = []
        for ops in (CPU, REFERENCE):
            cells = oracle.widened(oracle.poisoned(layout.cells, dtype=dtype))
            ops.insert(symbols, index, seed, cells, layout=layout)
            oracle.check_margins(cells)
            before = cells.clone()
            both.append((before, *ops.peel(cells, index, seed, layout=layout)))
            assert torch.equal(cells, before)
        for fast, slow in zip(*both, strict=True):
            assert torch.equal(fast, slow)
        stuck = both[0][2]
        assert torch.equal(both[0][1], symbols * (where & ~stuck))
        assert bool(stuck.any()) == (present == 300)


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
@pytest.mark.parametrize("symbol", ["int8x4", "int32x1"])
def test_no_elements(ops, symbol):
    layout = plan_layout(0, SYMBOLS[symbol], 3)
    nothing, one = torch.zeros(2, 0), torch.ones(2)
    case = Case(nothing, nothing.clone(), one, one, torch.ones(1, dtype=torch.int32), layout, 7, 0)
    got = encode(ops, case)
    assert got.index.tolist() == [[0], [0]]
    assert not got.counts.any()
    out, _, stats = decode(ops, got.index, got.cells[0], case, F32, 2)
    assert out.numel() == 0
    assert stats.tolist() == [0, 0]


# The smallest threshold for which every |x| up to 2048 is below 2**24 steps, see Ops.encode.
CONSERVED = [
    ("int8x4", F32, 2.0**-6),
    ("int16x2", BF16, 2.0**-4),
    ("int32x1", F32, 2.0**5),
    ("float32", BF16, 2.0**-6),
]
number = st.floats(-1024, 1024, width=32)


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
@pytest.mark.parametrize(("symbol", "dtype", "least"), CONSERVED, ids=[c[0] for c in CONSERVED])
@given(
    pairs=st.lists(st.tuples(number, number), min_size=1, max_size=40),
    octaves=st.floats(0, 8),
    room=st.integers(0, 40),
)
@settings(deadline=None, max_examples=80, derandomize=True)
def test_what_is_sent_plus_what_stays_is_what_was_there(
    symbol, dtype, least, ops, pairs, octaves, room
):
    """Exactly; for a bfloat16 residual, to its last bit: residual' = bf16(x - sent)."""
    grad, residual = torch.tensor(pairs).T.contiguous()[:, None]
    format_ = SYMBOLS[symbol]
    n, levels = grad.shape[1], format_.levels(1)
    threshold = torch.tensor([least * 2.0**octaves])
    step = quantization_step(threshold, format_, levels)
    layout = plan_layout(n, format_, n)
    case = Case(
        oracle.widened(grad), oracle.widened(residual.to(dtype)), threshold, step,
        torch.zeros(1, dtype=torch.int32), layout, levels, min(room, layout.groups),
    )  # fmt: skip
    got = encode(ops, case)
    sent, _, stats = decode(ops, got.index, got.cells[0], case, F32, 1)
    assert stats.tolist() == [got.counts[0, 2], 0]
    assert case.residual is not None
    assert got.residual is not None
    x = case.grad[0] + case.residual[0].float()
    assert got.residual.dtype == dtype
    if dtype == F32:
        assert torch.equal(sent + got.residual[0], x)
        assert torch.equal(sent.double() + got.residual[0].double(), x.double())
    else:
        exact = (x.double() - sent.double()).float()
        rounded = torch.from_numpy(oracle.to_bfloat16(exact.numpy()))
        assert torch.equal(got.residual[0].float(), rounded)
    # Kept elements that do not saturate are within half a step of what is sent.
    if format_.integer:
        kept = from_bitmap(got.index[0, :-1], layout.groups).repeat_interleave(format_.lanes)[:n]
        inside = kept & (x.abs() <= levels * step)
        assert bool(((x - sent).abs()[inside] <= step / 2).all())
        assert bool((sent[~kept] == 0).all())


def test_get_ops(monkeypatch):
    monkeypatch.delenv("TAGC_OPS", raising=False)
    assert get_ops("cpu") is CPU
    monkeypatch.setenv("TAGC_OPS", "reference")
    assert get_ops("cpu") is REFERENCE
    assert get_ops("cpu", "cpu") is CPU
    with pytest.raises(ValueError, match="unknown implementation 'numba'; choose from auto, "):
        get_ops("cpu", "numba")
    with pytest.raises(ValueError, match="'cpu' does not run on cuda"):
        get_ops("cuda", "cpu")
