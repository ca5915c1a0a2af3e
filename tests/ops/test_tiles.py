"""Shards of several tiles, on a CPU: the last elements of one tile, the first of the next, and
shards that go past the caches (1 MiB), against the reference to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support import block_cases, matrix_cases, oracle, packed_cases, sketch_cases
from tagc.ops import get_ops
from tagc.ops.blocks import BlockLayout
from tagc.ops.cpu.kernels.output import TILE
from tagc.ops.packed import POISON, PackedLayout, index_of, plan_packed

CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
F32, BF16 = torch.float32, torch.bfloat16
LARGE = 2**19 + 77
NUMELS = [TILE - 1, TILE, TILE + 1, 3 * TILE + 5, LARGE]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("n", NUMELS)
def test_blocks(n, dtype):
    rng = np.random.default_rng(n)
    for bits, block in ((4, 256), (8, 4096), (4, 32)) if n < LARGE else ((4, 256),):
        case = block_cases.make_case(n, 2, block, (bits, dtype, None), rng)
        message, _ = block_cases.quantize(CPU, case, 0.0)
        for divisor in (2, 3):
            outs = [
                block_cases.dequantize(ops, message[None], case.layout, dtype, divisor)
                for ops in (CPU, REFERENCE)
            ]
            assert oracle.same_values(*outs)


@pytest.mark.parametrize(("bits", "group"), [(1, 1), (2, 1), (1, 8)])
@pytest.mark.parametrize("shape", [(9, 1001), (17, 1024), (3, TILE + 3), (200, 2050), (600, 1000)])
def test_matrices(shape, bits, group):
    rng = np.random.default_rng(shape)
    case = matrix_cases.make_case(shape, 2, (bits, group, F32, None), rng)
    message, _ = matrix_cases.quantize(CPU, case, 0.0)
    for dtype in (F32, BF16):
        outs = [
            matrix_cases.dequantize(ops, message, case.layout, dtype, 2) for ops in (CPU, REFERENCE)
        ]
        assert oracle.same_values(*outs)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("n", NUMELS)
def test_packed(n, group):
    rng = np.random.default_rng(n)
    for low_bits in (0, 4, 8, 16) if n < LARGE else (4,):
        variant = group, 4, F32, None
        case = packed_cases.make_case(n, 2, 256, variant, "usual", rng, low_bits=low_bits)
        message = packed_cases.pack(CPU, case).message
        outs = [packed_cases.unpack(ops, message, case.layout, F32, 2) for ops in (CPU, REFERENCE)]
        assert oracle.same_values(*outs)


@pytest.mark.parametrize("symbol", ["int8x4", "int32x1"])
@pytest.mark.parametrize("n", NUMELS)
def test_sketches(n, symbol):
    rng = np.random.default_rng(n)
    case = sketch_cases.make_case(n, 1, symbol, F32, None, "usual", rng)
    sent = sketch_cases.encode(CPU, case)
    outs = [
        sketch_cases.decode(ops, sent.index, sent.cells[0], case, F32, 2)[0]
        for ops in (CPU, REFERENCE)
    ]
    assert oracle.same_values(*outs)


def test_a_damaged_index_stays_inside_of_its_tile():
    """Keys with 16 low bits ascend from one piece that is read to the next, whatever the words are:
    a low part of 0 in the second piece is a key that was there before."""
    n, kept = 1 << 21, 3000
    layout = PackedLayout(
        numel=n, group=1, capacity=kept, low_bits=16,
        values=BlockLayout(numel=kept, bits=8, block=256),
    )  # fmt: skip
    grad = torch.zeros(1, n)
    grad[0, n - 2 * kept :: 2] = 127.0  # exact in 8 bits
    message, counts = torch.empty(1, layout.words, dtype=torch.int32), torch.empty(1, 4).int()
    CPU.pack(grad, None, torch.full((1,), 0.5), message, counts, layout=layout)
    assert plan_packed(1 << 27, capacity=1100).low_bits == 16
    whole, damaged = torch.empty(n), torch.empty(n)
    CPU.unpack(message, whole, layout=layout, divisor=1)
    assert torch.equal(whole, grad[0])
    parts = index_of(message, layout)[0].view(torch.int16)
    assert int(parts[1024]) != 0
    parts[1024] = 0
    CPU.unpack(message, damaged, layout=layout, divisor=1)
    assert damaged.sum() == 127 * kept
    assert int((damaged != whole).sum()) == 2


def test_damaged_messages_stay_within_bounds():
    rng = np.random.default_rng(0)
    n = 5 * TILE
    for low_bits in packed_cases.LOW_BITS:
        layout = PackedLayout(
            numel=n, group=1, capacity=n // 3, low_bits=low_bits,
            values=BlockLayout(numel=n // 3, bits=4, block=256),
        )  # fmt: skip
        words = rng.integers(-(2**31), 2**31, (2, layout.words), dtype=np.int32)
        words[:, POISON] = 0
        out = oracle.widened(oracle.poisoned(n, dtype=F32))
        CPU.unpack(torch.from_numpy(words), out, layout=layout, divisor=1)
        oracle.check_margins(out)


def test_rows_of_a_damaged_matrix_stay_apart():
    """A row whose scale is infinite leaves those that follow it as they are."""
    case = matrix_cases.make_case((4, 5), 1, (1, 1, F32, None), np.random.default_rng(0))
    message, _ = matrix_cases.quantize(CPU, case, 0.0)
    message = message.clone()
    base, columns, _ = case.layout.head
    first = base + columns
    # An infinite scale is 0x7F8 as a row's byte and the base.
    message[0, 0], message[0, first] = 0x7F8 - 200, 200 + (100 << 8) + (100 << 16) + (100 << 24)
    outs = [matrix_cases.dequantize(ops, message, case.layout) for ops in (CPU, REFERENCE)]
    assert oracle.same_values(*outs)
    assert outs[0].view(4, 5)[1:].isfinite().all()
    assert not outs[0].view(4, 5)[0].isfinite().any()
