"""The Triton operators of sparse packing where it gets tight: indexes, many words, damage.

Every case runs interpreted on the CPU and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from support import oracle
from support.kernel_cases import Cases, check_margins, kernels, placed
from support.packed_kernels import (
    BF16,
    F32,
    I32,
    LOW_BITS,
    check,
    check_index,
    check_sum,
    packed,
    problem,
)
from tagc.ops import reference
from tagc.ops.blocks import BlockLayout
from tagc.ops.packed import POISON, PackedLayout, index_of, plan_packed

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

CASES = case = Cases()


@case("bits past the last group mean nothing")
def _(device):
    tail = torch.tensor(-1 << 305 % 32, dtype=I32)
    p = problem(610, "usual", group=2, low=0)
    message = packed(reference, p, "cpu")["message"]
    assert message is not None
    index_of(message, p.layout)[:, -1] |= tail
    check_sum(message, p.layout, device)


@case("indexes")
def _(device):
    rng = np.random.default_rng(0)
    for groups, share in ((1, 1.0), (33, 0.5), (64, 0.0), (1000, 1.0), (1999, 0.1)):
        present = torch.from_numpy(rng.random((2, groups)) < share)
        for low in LOW_BITS:
            spare = 0 if groups % 2 else 3
            capacity = min(groups, int(present.sum(1).max()) + spare)
            layout = PackedLayout(
                numel=groups, group=1, capacity=capacity, low_bits=low,
                values=BlockLayout(numel=capacity, bits=8),
            )  # fmt: skip
            check_index(present, layout, device)


@case("indexes of several blocks of words")
def _(device):
    rng = np.random.default_rng(0)
    present = torch.zeros(1, 70001, dtype=torch.bool)
    for first, last, keys in ((0, 1000, 300), (20000, 69000, 100), (69990, 70001, 11)):
        present[0, first + rng.choice(last - first, keys, replace=False)] = True
    # As many chunks of blocks as a million words have.
    with mock.patch.object(kernels("rank"), "_CHUNK", 2):
        for low in (1, 8):
            layout = replace(plan_packed(70001, capacity=500), low_bits=low)
            check_index(present, layout, device)


@case("messages of several blocks of words")
def _(device):
    p = problem(40000, "empty", bits=4, R=1, grad=BF16)
    p.layout = replace(plan_packed(40000, capacity=200, bits=4, block=64), low_bits=4)
    p.grad.clamp_(-1, 1)
    assert p.residual is not None
    p.residual.zero_()
    p.grad[0, -90::3] = 2.0
    p.grad[0, :5000:100] = -3.0
    p.threshold.fill_(1.5)
    with mock.patch.object(kernels("rank"), "_CHUNK", 1):
        assert check(p, device)["counts"][0, 2] == 80


@case("additions in the order of the messages")
def _(device):
    for dtype, divisor in ((F32, 1), (BF16, 3)):
        p = problem(300, "room for all", R=6, residual=None)
        p.grad *= torch.tensor([1, 1e3, 1e-3, 1, 1e2, 1e-2])[:, None]
        message = packed(reference, p, "cpu")["message"]
        assert message is not None
        forth = check_sum(message, p.layout, device, dtype=dtype, divisor=divisor)
        back = check_sum(message.flip(0), p.layout, device, dtype=dtype, divisor=divisor)
        assert dtype != F32 or not torch.equal(forth, back)


@case("tiles of the output: borders, empty rows, and more values than are decoded at once")
def _(device):
    tile = kernels("unpack")._TILE
    for n, group, low in ((tile - 1, 1, 0), (2 * tile, 1, 2), (2 * tile + 3, 4, 1),
                          (3 * tile + 32, 2, 0)):  # fmt: skip
        p = problem(n, "empty", group=group, grad=BF16, R=3)
        capacity = -(-n // group) // 10
        p.layout = replace(plan_packed(n, capacity=capacity, group=group, block=64), low_bits=low)
        assert p.residual is not None
        p.grad.clamp_(-0.5, 0.5)
        p.residual.zero_()
        p.grad[0, group : (capacity + 1) * group] = 2.0  # neighbours: all that fits
        p.grad[1, tile - 2 * group : tile + 2 * group] = -3.0
        p.threshold.fill_(1.0)
        counts = check(p, device)["counts"]
        assert counts[0, 2] == capacity
        assert counts[2, 2] == 0
        _, slots, _ = kernels("unpack").turn_of(p.layout)
        assert n < 2 * tile or min(capacity, tile // group) > slots


@case("tiles that are full, and blocks of ranks that are")
def _(device):
    p = problem(2 * kernels("unpack")._TILE, "room for all", R=2, residual=None)
    p.grad[p.grad == 0] = 1.0
    assert (check(p, device)["counts"][:, 2] == p.layout.groups).all()
    # As many words as a block of ranks has, and its last group.
    n = 32 * kernels("rank").RANK_BLOCK
    p = problem(n, "empty", R=1, residual=None)
    p.layout = plan_packed(n, capacity=3)
    p.grad.zero_()
    p.grad[0, 0] = p.grad[0, 2] = p.grad[0, -1] = 2.0**21
    assert check(p, device)["counts"][0, 2] == 3


@case("any rank's poison word")
def _(device):
    p = problem(130, "usual", R=3)
    message = packed(reference, p, "cpu")["message"]
    assert message is not None
    for r in range(3):
        sent = message.contiguous()
        sent[:, POISON] = torch.arange(3) == r
        assert check_sum(sent, p.layout, device).isnan().all()


@case("damaged messages and overfull bitmaps stay within bounds")
def _(device):
    ops, rng = kernels("ops"), np.random.default_rng(0)
    for low in (0, 1, 4):
        layout = replace(plan_packed(500, capacity=40, block=32), low_bits=low)
        words = rng.integers(-(2**31), 2**31, (2, layout.words), dtype=np.int32)
        words[:, POISON] = 0
        out = placed(oracle.poisoned(500, dtype=F32), device, False)
        bitmap = placed(oracle.poisoned(2, layout.bitmap_words, dtype=I32), device, False)
        message = placed(torch.from_numpy(words), device, False)
        assert message is not None
        ops.read_index(index_of(message, layout), bitmap, layout=layout)  # groups beyond the last
        ops.unpack(message, out, layout=layout, divisor=1)
        for tensor in (message, bitmap, out):
            check_margins(tensor)
        # More groups than fit: those past the capacity have no values and no place in the list.
        every = torch.full((2, layout.bitmap_words), -1, dtype=I32, device=device)
        guard = torch.full((2 * 40 + 600,), oracle.SENTINEL, dtype=I32, device=device)
        keys = guard[:80].view(2, 40)
        with mock.patch.object(kernels("listing"), "buffer", return_value=keys):
            index = placed(oracle.poisoned(2, layout.index_words, dtype=I32), device, False)
            if low:
                ops.write_index(every, index, layout=layout)
                check_margins(index)
                assert keys.tolist() == [[*range(40)]] * 2
        assert (guard[80:] == oracle.SENTINEL).all()


# --- interpreted in a process of its own, compiled and emulated, natively ----------------------

outcome, test_interpreted, test_compiled, test_on_a_gpu = CASES.tests(__file__, edges=True)


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
