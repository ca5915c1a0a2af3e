"""Packed sparse messages: the format, the reference against the oracle, the CPU against both.

Every tensor is a slice of a wider buffer; outputs are poisoned.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import oracle
from tagc.bitmap import to_bitmap
from tagc.blocks import BlockLayout
from tagc.ops import get_ops
from tagc.ops.cpu import bitmap, packer, selection
from tagc.packed import HEADER, KEPT_GROUPS, POISON, PackedLayout, plan_packed

OPS = CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LOW_BITS = (0, 1, 2, 4, 8, 16)
both = pytest.mark.parametrize("ops", OPS, ids=["cpu", "reference"])
# group, bits, gradient, residual; each row but those with float16, which the CPU widens first,
# costs a compilation of seconds.
VARIANTS = [
    (1, 8, F32, F32),
    (1, 4, F16, F32),
    (1, 2, BF16, BF16),
    (2, 4, F32, None),
    (4, 8, F32, BF16),
    (8, 2, F16, BF16),
    (16, 16, BF16, F32),
    (32, 8, F16, None),
]
variants = pytest.mark.parametrize(
    ("group", "bits", "grad_dtype", "residual_dtype"),
    VARIANTS,
    ids=lambda v: str(v).removeprefix("torch."),
)
# share of the groups above the threshold, share that the capacity holds
MODES = {
    "usual": (0.1, 0.12),
    "overflow": (0.4, 0.2),
    "nothing fits": (0.3, 0.0),
    "empty": (0.0, 0.1),
    "room for all": (0.2, 1.0),
    "support": (0.1, 0.3),
}


@dataclass
class Case:
    """Arguments of a pack of ``R`` rows."""

    grad: Tensor
    residual: Tensor | None
    threshold: Tensor
    support: Tensor | None
    layout: PackedLayout

    @property
    def x(self) -> Tensor:
        if self.residual is None:
            return self.grad.float()
        return self.grad.float() + self.residual.float()


@dataclass
class Packed:
    """Outputs of a pack."""

    message: Tensor
    counts: Tensor
    residual: Tensor | None

    def index(self, layout: PackedLayout) -> Tensor:
        return self.message[:, HEADER : HEADER + layout.index_words]


def make_case(n, R, block, variant, mode, rng, *, low_bits=None, spoilt=False) -> Case:
    group, bits, grad_dtype, residual_dtype = variant
    above, room = MODES[mode]
    values = oracle.spread if spoilt else oracle.values
    grad = values((R, n), rng).to(grad_dtype)
    residual = None
    if residual_dtype is not None:
        residual = oracle.values((R, n), rng).to(residual_dtype)
    if spoilt and n:
        for value in (math.nan, math.inf, -math.inf, 1e-45, -0.0):
            grad[0, rng.integers(n)] = value
        grad[0, -1] = 3.4028234e38
    groups = -(-n // group)
    capacity = int(room * groups)
    layout = plan_packed(n, capacity=capacity, group=group, bits=bits, block=block)
    if low_bits is not None:
        layout = replace(layout, low_bits=low_bits)
    case = Case(
        oracle.widened(grad),
        None if residual is None else oracle.widened(residual),
        torch.ones(R),
        None,
        layout,
    )
    if groups:
        x = case.x.nan_to_num(0, 0, 0).abs()
        whole = torch.nn.functional.pad(x, (0, groups * group - n)).unflatten(1, (groups, -1))
        size = whole.amax(-1).sort(1, descending=True).values
        case.threshold = size[:, min(groups - 1, round(above * groups))].clamp(min=2.0**-140)
    if mode == "empty":
        case.threshold = torch.full((R,), math.inf)
    if mode == "support":
        marked = torch.zeros(R, groups, dtype=torch.bool)
        for row in marked:
            row[torch.from_numpy(rng.permutation(groups)[: rng.integers(capacity + 1)])] = True
        case.support = oracle.widened(to_bitmap(marked))
    return case


def pack(ops, case: Case) -> Packed:
    rows, layout = case.grad.shape[0], case.layout
    residual = None if case.residual is None else oracle.widened(case.residual)
    message = oracle.widened(oracle.poisoned(rows, layout.words, dtype=torch.int32))
    counts = oracle.poisoned(rows, 4, dtype=torch.int32)
    before = case.grad.clone()
    ops.pack(case.grad, residual, case.threshold, case.support, message, counts, layout=layout)
    oracle.check_margins(message, residual)
    assert oracle.same_bits(case.grad, before)
    got = Packed(message, counts, residual)
    if case.support is not None:
        assert bool((got.index(layout) == oracle.SENTINEL).all())
    return got


def unpack(ops, message, support, layout, dtype=F32, divisor=1) -> Tensor:
    out = oracle.widened(oracle.poisoned(layout.numel, dtype=dtype))
    ops.unpack(message, support, out, layout=layout, divisor=divisor)
    oracle.check_margins(out)
    return out


def index_of(ops, groups: list[list[int]], layout: PackedLayout) -> Tensor:
    """Rows of groups, encoded."""
    marked = torch.zeros(len(groups), layout.groups, dtype=torch.bool)
    for row, members in zip(marked, groups, strict=True):
        row[members] = True
    index = oracle.widened(oracle.poisoned(len(groups), layout.index_words, dtype=torch.int32))
    ops.write_index(oracle.widened(to_bitmap(marked)), index, layout=layout)
    oracle.check_margins(index)
    return index


def layout_of(groups: int, capacity: int, low_bits: int, group: int = 1) -> PackedLayout:
    values = BlockLayout(numel=capacity * group, bits=8, block=32)
    return PackedLayout(
        numel=groups * group, group=group, capacity=capacity, low_bits=low_bits, values=values
    )


def test_words_of_a_layout():
    bits = layout_of(100, 10, 0)
    assert (bits.low_words, bits.high_words, bits.index_words) == (0, 4, 4)
    assert bits.words == 2 + 4 + bits.values.words
    # 10 keys of 4 low bits; 10 ones among 99 >> 4 zeros.
    split = layout_of(100, 10, 4)
    assert (split.low_words, split.high_words) == (2, 1)
    assert split.words == 2 + 3 + split.values.words
    assert (split.groups, split.bitmap_words) == (100, 4)
    assert layout_of(0, 0, 0).words == 2


def test_the_plan_is_the_smallest():
    for n, group, density in itertools.product((0, 1, 1000, 10**6), (1, 32), (0, 0.001, 0.05, 0.5)):
        groups = -(-n // group)
        layout = plan_packed(n, capacity=int(density * groups), group=group)
        each = [replace(layout, low_bits=low).index_words for low in LOW_BITS]
        assert layout.index_words == min(each)
        assert layout.low_bits == LOW_BITS[each.index(min(each))]
    # 2 + log2(1 / density) bits a key.
    layout = plan_packed(1 << 20, capacity=1 << 16)
    assert layout.low_bits == 4
    assert layout.index_words * 32 == 6 * layout.capacity


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"numel": -1, "capacity": 0}, "numel must not be negative, got -1"),
        ({"numel": 9, "capacity": 1, "group": 3}, "a power of two up to 32, got 3"),
        ({"numel": 9, "capacity": 1, "group": 64}, "a power of two up to 32, got 64"),
        ({"numel": 1 << 31, "capacity": 1}, "fewer than 2.*31 groups"),
        ({"numel": 9, "capacity": 4, "group": 4}, r"capacity must be in \[0, 3\], got 4"),
        ({"numel": 9, "capacity": -1}, r"capacity must be in \[0, 9\], got -1"),
        ({"numel": 9, "capacity": 1, "bits": 5}, "bits must be one of"),
    ],
)
def test_layouts_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_packed(**arguments)


@both
def test_an_index_written_out(ops):
    """The example of :mod:`tagc.packed`: low parts 3, 1, 2, high bits 0, 3 and 4."""
    layout = layout_of(16, 3, 2)
    assert index_of(ops, [[3, 9, 10]], layout).tolist() == [[0b10_01_11, 0b11001]]
    assert index_of(ops, [[3, 9, 10]], replace(layout, low_bits=0)).tolist() == [[0b110_0000_1000]]


def written_out(groups: list[int], layout: PackedLayout) -> list[int]:
    """An index as two large integers."""
    low = high = 0
    for i, g in enumerate(groups):
        low |= g % 2**layout.low_bits << i * layout.low_bits
        high |= 1 << ((g >> layout.low_bits) + i if layout.low_bits else g)
    words = [low >> 32 * w & oracle.MASK for w in range(layout.low_words)]
    words += [high >> 32 * w & oracle.MASK for w in range(layout.high_words)]
    assert low >> 32 * layout.low_words == high >> 32 * layout.high_words == 0
    return [oracle.signed(w, 32) for w in words]


@both
@given(
    groups=st.integers(1, 70) | st.integers(1, 70_000),
    rows=st.lists(st.sets(st.integers(0, 2**40), max_size=60), min_size=1, max_size=3),
    low_bits=st.sampled_from(LOW_BITS),
    spare=st.integers(0, 40),
)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_an_index_is_read_as_it_was_written(ops, groups, rows, low_bits, spare):
    members = [sorted({g % groups for g in row} | {groups - 1}) for row in rows]
    capacity = min(groups, max(map(len, members)) + spare)
    layout = layout_of(groups, capacity, low_bits)
    index = index_of(ops, members, layout)
    assert index.tolist() == [written_out(row, layout) for row in members]
    back = oracle.widened(oracle.poisoned(len(rows), layout.bitmap_words, dtype=torch.int32))
    ops.read_index(index, back, layout=layout)
    oracle.check_margins(back)
    assert [oracle.bits_of(row, 32 * layout.bitmap_words) for row in back.numpy()] == members


def check_against_oracle(case: Case, got: Packed) -> None:
    layout = case.layout
    n, group = layout.numel, layout.group
    for r, x in enumerate(case.x.numpy()):
        members = [np.arange(g * group, min(n, (g + 1) * group)) for g in range(layout.groups)]
        finite = [bool(np.isfinite(x[m]).all()) for m in members]
        size = [
            float(np.abs(x[m]).max()) if ok else 0.0 for m, ok in zip(members, finite, strict=True)
        ]
        nonzero = [g for g in range(layout.groups) if size[g] > 0]
        above = [g for g in nonzero if size[g] >= float(case.threshold[r])]
        if case.support is not None:
            kept = above = oracle.bits_of(case.support[r].numpy(), layout.groups)
        elif layout.capacity < layout.groups:
            kept = sorted(sorted(above, key=lambda g: (-size[g], g))[: layout.capacity])
        else:
            kept = nonzero
        assert got.counts[r].tolist() == [len(above), len(nonzero), len(kept), 0]
        message = got.message[r].tolist()
        assert message[POISON] == (not all(finite))
        assert message[KEPT_GROUPS] == len(kept)
        first_value = HEADER + layout.index_words
        if case.support is None:
            assert message[HEADER:first_value] == written_out(kept, layout)
        stream = np.zeros(layout.values.numel, np.float32)
        for i, g in enumerate(kept):
            if finite[g]:
                stream[i * group : i * group + len(members[g])] = x[members[g]]
        row = oracle.quantize_row(stream, layout.values.bits, layout.values.block)
        assert message[first_value:] == row.words
        if got.residual is None or case.residual is None:
            continue
        left = x.copy()
        for i, g in enumerate(kept):
            left[members[g]] = row.left[i * group : i * group + len(members[g])]
        expected = torch.from_numpy(left)
        if got.residual.dtype == BF16:
            largest = torch.finfo(BF16).max
            clipped = expected.nan_to_num(0, 0, 0)
            expected = torch.from_numpy(oracle.to_bfloat16(clipped.numpy()))
            expected = expected.clamp(-largest, largest)
        for g in np.flatnonzero(~np.array(finite, dtype=bool)):
            expected[members[g]] = case.residual[r].float()[members[g]]
        assert torch.equal(got.residual[r].float(), expected)


@pytest.mark.parametrize("mode", MODES)
@both
@variants
def test_packs_by_the_contract(group, bits, grad_dtype, residual_dtype, ops, mode):
    rng = np.random.default_rng(0)
    variant = group, bits, grad_dtype, residual_dtype
    for n, spoilt in itertools.product((1, 33, 200), (False, True)):
        case = make_case(n, 2, 32, variant, mode, rng, spoilt=spoilt)
        check_against_oracle(case, pack(ops, case))


def test_modes_are_what_they_say():
    for mode in MODES:
        case = make_case(1000, 2, 32, (4, 8, F32, F32), mode, np.random.default_rng(1))
        above, nonzero, kept, _ = pack(REFERENCE, case).counts.unbind(1)
        assert bool((above > case.layout.capacity).all()) == (mode in ("overflow", "nothing fits"))
        assert bool((kept == 0).all()) == (mode in ("nothing fits", "empty"))
        assert torch.equal(kept, nonzero) == (mode == "room for all")


@pytest.mark.parametrize("mode", MODES)
@variants
def test_cpu_is_the_reference_to_the_bit(group, bits, grad_dtype, residual_dtype, mode):
    rng = np.random.default_rng(2)
    variant = group, bits, grad_dtype, residual_dtype
    cases = itertools.product((0, 1, 1000, 4099), (False, True), range(3))
    shapes = itertools.cycle(itertools.product((32, 256, 4096), LOW_BITS))
    for (n, spoilt, _), (block, low_bits) in zip(cases, shapes, strict=False):
        case = make_case(n, 3, block, variant, mode, rng, low_bits=low_bits, spoilt=spoilt)
        fast, slow = (pack(ops, case) for ops in OPS)
        assert torch.equal(fast.message, slow.message)
        assert torch.equal(fast.counts, slow.counts)
        if fast.residual is not None and slow.residual is not None:
            assert oracle.same_bits(fast.residual, slow.residual)
        support = None if case.support is None else case.support[1]
        # With the row that may be spoilt, and without.
        for rows in (fast.message, fast.message[1:]):
            outs = [unpack(ops, rows, support, case.layout, grad_dtype, 3) for ops in OPS]
            assert oracle.same_values(*outs)


@pytest.mark.parametrize("mode", MODES)
@both
@pytest.mark.parametrize(("group", "dtype"), [(2, F32), (4, BF16)])
def test_selects_what_pack_would_keep(group, dtype, ops, mode):
    rng = np.random.default_rng(3)
    for n, spoilt in itertools.product((0, 1, 33, 1000), (False, True)):
        case = make_case(n, 2, 32, (group, 8, dtype, None), mode, rng, spoilt=spoilt, low_bits=4)
        case.support = None
        got, layout = pack(REFERENCE, case), case.layout
        words, kept = (
            oracle.widened(oracle.poisoned(2, layout.bitmap_words, dtype=torch.int32))
            for _ in range(2)
        )
        REFERENCE.read_index(got.index(layout), words, layout=layout)
        counts = oracle.poisoned(2, 4, dtype=torch.int32)
        before = case.grad.clone()
        ops.select(case.grad, case.threshold, kept, counts, layout=layout)
        oracle.check_margins(kept)
        assert oracle.same_bits(case.grad, before)
        assert torch.equal(kept, words)
        assert torch.equal(counts, got.counts)


@pytest.mark.parametrize("divisor", [1, 3])
@both
@variants
def test_unpacks_by_the_contract(group, bits, grad_dtype, residual_dtype, ops, divisor):
    """The sum in the order of the ranks, over chunks of the output that differ in what they get."""
    rng = np.random.default_rng(4)
    variant = group, bits, grad_dtype, residual_dtype
    for n, mode in itertools.product((1, 33, 9000), ("usual", "room for all", "support")):
        case = make_case(n, 3, 64, variant, mode, rng)
        layout = case.layout
        if case.support is not None:
            case.support = case.support[:1].expand(3, -1)
        got = pack(REFERENCE, case)
        total = np.zeros(layout.groups * group, np.float32)
        for r, x in enumerate(case.x.numpy()):
            padded = np.zeros((layout.groups, group), np.float32)
            padded.reshape(-1)[:n] = x
            if case.support is None:
                words = torch.empty(1, layout.bitmap_words, dtype=torch.int32)
                REFERENCE.read_index(got.index(layout)[r : r + 1], words, layout=layout)
            else:
                words = case.support[:1]
            kept = oracle.bits_of(words[0].numpy(), layout.groups)
            stream = np.zeros((layout.capacity, group), np.float32)
            stream[: len(kept)] = padded[kept]
            row = oracle.quantize_row(stream.reshape(-1), bits, 64)
            sent = oracle.elements_of(row, stream.size).astype(np.float32)
            total.reshape(-1, group)[kept] += sent.reshape(-1, group)[: len(kept)]
        expected = torch.from_numpy(total[:n] / np.float32(divisor)).to(grad_dtype)
        support = None if case.support is None else case.support[0]
        out = unpack(ops, got.message, support, layout, grad_dtype, divisor)
        assert oracle.same_bits(out, expected)


@both
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_is_not_finite_poisons_and_stays_out_of_the_residual(dtype, ops):
    """Kept or left, with a support or without; a sum that overflows counts, too."""
    layout = layout_of(50, 50, 0, group=2)
    for where, value, old in ((7, math.nan, 0.5), (7, -math.inf, 0.5), (98, 3e38, 3e38)):
        for members in (None, [3, 49], [10]):
            grad, residual = torch.ones(2, 100), torch.full((2, 100), 0.5).to(dtype)
            grad[1, where], residual[1, where] = value, old
            support = None
            if members is not None:
                support = index_of(REFERENCE, [members, members], layout)
            case = Case(grad, residual, torch.ones(2), support, layout)
            got = pack(ops, case)
            assert got.message[:, POISON].tolist() == [0, 1]
            left = got.residual
            assert left is not None
            assert bool(left.isfinite().all())
            bad = slice(where // 2 * 2, where // 2 * 2 + 2)
            assert oracle.same_bits(left[1, bad], residual[1, bad])
            # What is left is owed in full, what is kept in part.
            assert bool((left[0] == (1.5 if members else left[0])).sum() >= 96)
            for out_dtype in (F32, BF16, F16):
                row = None if support is None else support[0]
                out = unpack(ops, got.message, row, layout, out_dtype, 2)
                assert bool(out.isnan().all())
                assert bool(unpack(ops, got.message[:1], row, layout, out_dtype).isfinite().all())


number = st.floats(-1024, 1024, width=32)


@both
@given(
    pairs=st.lists(st.tuples(number, number), min_size=1, max_size=70),
    form=st.sampled_from([(1, 4, F32), (1, 8, F32), (4, 8, BF16)]),
    octave=st.integers(-10, 10),
    room=st.integers(0, 70),
)
@settings(deadline=None, max_examples=80, derandomize=True)
def test_what_is_sent_plus_what_stays_is_what_was_there(ops, pairs, form, octave, room):
    """To the last bit; a bfloat16 residual is off by its rounding, half of 2**-7."""
    group, bits, dtype = form
    grad, residual = torch.tensor(pairs).T.contiguous()[:, None].unbind(0)
    n = len(pairs)
    layout = plan_packed(n, capacity=min(room, -(-n // group)), group=group, bits=bits, block=32)
    case = Case(grad, residual.to(dtype), torch.tensor([2.0**octave]), None, layout)
    got = pack(ops, case)
    assert got.residual is not None
    sent = unpack(ops, got.message, None, layout).double()
    exact = case.x[0].double() - sent
    if dtype == F32:
        assert torch.equal(got.residual[0].double(), exact)
    else:
        off = (got.residual[0].double() - exact).abs()
        assert bool((off <= exact.abs() * 2.0**-8 + 2.0**-134).all())


@both
def test_twice_the_same(ops):
    case = make_case(3000, 2, 64, (4, 8, F32, BF16), "overflow", np.random.default_rng(5))
    a, b = (pack(ops, case) for _ in range(2))
    assert torch.equal(a.message, b.message)
    assert a.residual is not None
    assert b.residual is not None
    assert oracle.same_bits(a.residual, b.residual)


def test_more_groups_than_fit():
    """The CPU writes to raw memory, so it looks first."""
    layout = layout_of(64, 3, 4)
    words = torch.tensor([[0b1111, 0]], dtype=torch.int32)
    with pytest.raises(ValueError, match="room for 3 groups got 4"):
        index_of(CPU, [[0, 1, 2, 3]], layout)
    residual = torch.ones(1, 64)
    case = Case(torch.ones(1, 64), residual, torch.ones(1), words, layout)
    with pytest.raises(ValueError, match="room for 3 groups got 4"):
        pack(CPU, case)
    assert bool((residual == 1).all())


@pytest.mark.parametrize("group", [1, 4])
def test_prepared_is_compiled(group):
    case = make_case(500, 2, 32, (group, 8, F32, F32), "overflow", np.random.default_rng(6))
    kernels = (
        selection.select_groups, selection.keep_largest, packer.pack_values, packer.unpack_shard,
        bitmap.keys_of, bitmap.write_index, bitmap.read_index, bitmap.write_keys,
        bitmap.write_bitmap, bitmap.count_bits,
    )  # fmt: skip
    layout = case.layout
    CPU.prepare_packed(layout, F32, F32)
    before = [len(kernel.signatures) for kernel in kernels]
    got = pack(CPU, case)
    words, counts = torch.empty(2, layout.bitmap_words, dtype=torch.int32), got.counts
    CPU.read_index(got.index(layout), words, layout=layout)
    CPU.select(case.grad, case.threshold, words, counts, layout=layout)
    CPU.write_index(words, got.index(layout), layout=layout)
    unpack(CPU, got.message, None, layout, F32, 2)
    unpack(CPU, got.message, words[0], layout, F32, 2)
    assert [len(kernel.signatures) for kernel in kernels] == before
