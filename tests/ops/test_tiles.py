"""Damaged messages stay within the tiles of a CPU's shard."""

from __future__ import annotations

import numpy as np
import torch

from support import matrix_cases, oracle, packed_cases
from tagc.ops import get_ops
from tagc.ops.blocks import BlockLayout
from tagc.ops.cpu.kernels.output import TILE
from tagc.ops.packed import POISON, PackedLayout, index_of, plan_packed

CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
F32, BF16 = torch.float32, torch.bfloat16


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
