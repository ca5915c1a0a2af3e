"""Packed sparse messages: the reference against the oracle, and what holds for all."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import oracle
from support.marks import slow
from support.packed_cases import (
    BF16,
    CPU,
    F16,
    F32,
    MODES,
    REFERENCE,
    Case,
    Packed,
    both,
    layout_of,
    make_case,
    pack,
    unpack,
    variants,
    written_out,
)
from tagc.ops.cpu.kernels import bitmap, packer, selection, unpacker
from tagc.ops.packed import KEPT_GROUPS, POISON, plan_packed, values_of


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
        if layout.capacity < layout.groups:
            kept = sorted(sorted(above, key=lambda g: (-size[g], g))[: layout.capacity])
        else:
            kept = nonzero
        assert got.counts[r].tolist() == [len(above), len(nonzero), len(kept), 0]
        message = got.message[r]
        assert message[POISON] == (not all(finite))
        assert message[KEPT_GROUPS] == len(kept)
        assert got.index(layout)[r].tolist() == written_out(kept, layout)
        stream = np.zeros(layout.values.numel, np.float32)
        for i, g in enumerate(kept):
            stream[i * group : i * group + len(members[g])] = x[members[g]]
        row = oracle.quantize_row(stream, layout.values.bits, layout.values.block)
        assert values_of(message, layout).tolist() == row.words
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


@pytest.mark.some(16)
@pytest.mark.parametrize("mode", MODES)
@variants
def test_packs_by_the_contract(group, bits, grad_dtype, residual_dtype, mode):
    rng = np.random.default_rng(0)
    variant = group, bits, grad_dtype, residual_dtype
    for n, spoilt in itertools.product((1, 33, 200), (False, True)):
        case = make_case(n, 2, 32, variant, mode, rng, spoilt=spoilt)
        check_against_oracle(case, pack(REFERENCE, case))


def test_modes_are_what_they_say():
    for mode in MODES:
        case = make_case(1000, 2, 32, (4, 8, F32, F32), mode, np.random.default_rng(1))
        above, nonzero, kept, _ = pack(REFERENCE, case).counts.unbind(1)
        assert bool((above > case.layout.capacity).all()) == (mode in ("overflow", "nothing fits"))
        assert bool((kept == 0).all()) == (mode in ("nothing fits", "empty"))
        assert torch.equal(kept, nonzero) == (mode == "room for all")


@pytest.mark.some(8)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("group", "dtype"), [(1, F32), slow(2, F32), (4, BF16)])
def test_selects_what_pack_would_keep(group, dtype, mode):
    rng = np.random.default_rng(3)
    for n, spoilt in itertools.product((0, 1, 33, 1000), (False, True)):
        case = make_case(n, 2, 32, (group, 8, dtype, None), mode, rng, spoilt=spoilt, low_bits=4)
        got, layout = pack(REFERENCE, case), case.layout
        words, kept = (
            oracle.widened(oracle.poisoned(2, layout.bitmap_words, dtype=torch.int32))
            for _ in range(2)
        )
        REFERENCE.read_index(got.index(layout), words, layout=layout)
        counts = oracle.poisoned(2, 4, dtype=torch.int32)
        before = case.grad.clone()
        REFERENCE.select(case.grad, case.threshold, kept, counts, layout=layout)
        oracle.check_margins(kept)
        assert oracle.same_bits(case.grad, before)
        assert torch.equal(kept, words)
        assert torch.equal(counts, got.counts)


@pytest.mark.some(6)
@pytest.mark.parametrize("divisor", [1, 3])
@variants
def test_unpacks_by_the_contract(group, bits, grad_dtype, residual_dtype, divisor):
    """The sum in the order of the ranks, over chunks of the output that differ in what they get."""
    rng = np.random.default_rng(4)
    variant = group, bits, grad_dtype, residual_dtype
    for n, mode in itertools.product((1, 33, 9000), ("usual", "room for all")):
        case = make_case(n, 3, 64, variant, mode, rng)
        layout = case.layout
        got = pack(REFERENCE, case)
        total = np.zeros(layout.groups * group, np.float32)
        for r, x in enumerate(case.x.numpy()):
            padded = np.zeros((layout.groups, group), np.float32)
            padded.reshape(-1)[:n] = x
            words = torch.empty(1, layout.bitmap_words, dtype=torch.int32)
            REFERENCE.read_index(got.index(layout)[r : r + 1], words, layout=layout)
            kept = oracle.bits_of(words[0].numpy(), layout.groups)
            stream = np.zeros((layout.capacity, group), np.float32)
            stream[: len(kept)] = padded[kept]
            row = oracle.quantize_row(stream.reshape(-1), bits, 64)
            sent = oracle.elements_of(row, stream.size).astype(np.float32)
            total.reshape(-1, group)[kept] += sent.reshape(-1, group)[: len(kept)]
        expected = torch.from_numpy(total[:n] / np.float32(divisor)).to(grad_dtype)
        out = unpack(REFERENCE, got.message, layout, grad_dtype, divisor)
        assert oracle.same_bits(out, expected)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("ops", [slow(CPU), REFERENCE], ids=["cpu", "reference"])
def test_what_is_not_finite_poisons_and_stays_out_of_the_residual(dtype, ops):
    """Kept or left; a sum that overflows counts, too."""
    layout = layout_of(50, 50, 0, group=2)
    for where, value, old in ((7, math.nan, 0.5), (7, -math.inf, 0.5), (98, 3e38, 3e38)):
        grad, residual = torch.ones(2, 100), torch.full((2, 100), 0.5).to(dtype)
        grad[1, where], residual[1, where] = value, old
        got = pack(ops, Case(grad, residual, torch.ones(2), layout))
        assert got.message[:, POISON].tolist() == [0, 1]
        left = got.residual
        assert left is not None
        assert bool(left.isfinite().all())
        bad = slice(where // 2 * 2, where // 2 * 2 + 2)
        assert oracle.same_bits(left[1, bad], residual[1, bad])
        for out_dtype in (F32, BF16, F16):
            assert bool(unpack(ops, got.message, layout, out_dtype, 2).isnan().all())
            assert bool(unpack(ops, got.message[:1], layout, out_dtype).isfinite().all())


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
    case = Case(grad, residual.to(dtype), torch.tensor([2.0**octave]), layout)
    got = pack(ops, case)
    assert got.residual is not None
    sent = unpack(ops, got.message, layout).double()
    exact = case.x[0].double() - sent
    if dtype == F32:
        assert torch.equal(got.residual[0].double(), exact)
    else:
        off = (got.residual[0].double() - exact).abs()
        assert bool((off <= exact.abs() * 2.0**-8 + 2.0**-134).all())


@pytest.mark.parametrize(("group", "bits", "dtype"), [(1, 8, F32), (4, 4, BF16), slow(4, 8, F32)])
def test_prepared_is_compiled(group, bits, dtype):
    case = make_case(500, 2, 32, (group, bits, dtype, dtype), "overflow", np.random.default_rng(6))
    kernels = (
        selection.select_groups, selection.keep_largest, packer.pack_values, unpacker.unpack_shard,
        bitmap.keys_of, bitmap.write_index, bitmap.read_index, bitmap.write_keys,
        bitmap.write_bitmap, bitmap.count_bits,
    )  # fmt: skip
    layout = case.layout
    CPU.prepare_packed(layout, dtype, dtype)
    before = [len(kernel.signatures) for kernel in kernels]
    got = pack(CPU, case)
    words, counts = torch.empty(2, layout.bitmap_words, dtype=torch.int32), got.counts
    CPU.read_index(got.index(layout), words, layout=layout)
    CPU.select(case.grad, case.threshold, words, counts, layout=layout)
    CPU.write_index(words, got.index(layout), layout=layout)
    unpack(CPU, got.message, layout, dtype, 2)
    assert [len(kernel.signatures) for kernel in kernels] == before
