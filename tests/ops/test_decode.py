"""Decoding of sketches: the reference against the oracle, and what was encoded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import oracle
from support.marks import named, slow
from support.sketch_cases import (
    BF16,
    CPU,
    F32,
    REFERENCE,
    SIZES,
    Case,
    decode,
    encode,
    make_case,
    ranks_to_one,
    variants,
)
from tagc.codecs.sketch.plan import quantization_step
from tagc.ops.bitmap import from_bitmap
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS


@pytest.mark.some(4)
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
        assert torch.equal(out, expected)
        if residual is not None and case.residual is not None:
            add = oracle.estimate(peeled, seed, step, layout)
            after = (case.residual[0].double() + torch.from_numpy(add).double()).to(residual.dtype)
            close = {F32: 1e-6, BF16: 2.0**-7}[residual.dtype]
            torch.testing.assert_close(residual, after, rtol=close, atol=1e-6 * np.abs(add).max())
            assert bool((residual != case.residual[0]).any()) == bool(np.any(add))
    # The largest size overloads its table of one key, so that an estimate was checked.
    assert bool(peeled.stuck) == (keys == 1)


def test_more_keys_than_cells_are_peeled_as_far_as_they_go():
    """The CPU peels those, and more than 2**20 keys, by another queue than fewer."""
    case = make_case(1400, 1, "int8x4", F32, F32, "room for all", np.random.default_rng(6))
    case.layout = replace(case.layout, hashes=3, partition=110)
    index, cells = ranks_to_one(case)
    fast, slow = (decode(ops, index, cells, case, F32, 1) for ops in (CPU, REFERENCE))
    keys, stuck = slow[2].tolist()
    assert keys > case.layout.cells
    assert 0 < stuck < keys - 50
    for a, b in zip(fast, slow, strict=True):
        assert a is not None
        assert b is not None
        assert oracle.same_bits(a, b)


# The smallest threshold for which every |x| up to 2048 is below 2**24 steps, see Ops.encode.
CONSERVED = [
    ("int8x4", F32, 2.0**-6),
    ("int16x2", BF16, 2.0**-4),
    ("int32x1", F32, 2.0**5),
]
number = st.floats(-1024, 1024, width=32)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("ops", "symbol", "dtype", "least"),
    # The CPU's are compiled for these symbols.
    [
        case if ops is REFERENCE or case[1] in ("int8x4", "int32x1") else slow(*case)
        for ops in (CPU, REFERENCE)
        for case in [(ops, *conserved) for conserved in CONSERVED]
    ],
    ids=named,
)
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
    kept = from_bitmap(got.index[0, :-1], layout.groups).repeat_interleave(format_.lanes)[:n]
    inside = kept & (x.abs() <= levels * step)
    assert bool(((x - sent).abs()[inside] <= step / 2).all())
    assert bool((sent[~kept] == 0).all())
