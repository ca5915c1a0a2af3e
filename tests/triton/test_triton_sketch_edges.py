"""The Triton operators of sketches where it gets tight, against the reference, to the bit.

Every case runs interpreted on the CPU and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from support import oracle
from support.kernel_cases import Cases, canonical, kernels, same
from support.sketch_kernels import (
    BF16,
    F16,
    F32,
    I32,
    Problem,
    check,
    check_codec,
    problem,
    run_decode,
    run_encode,
)
from tagc.ops import reference
from tagc.ops.bitmap import to_bitmap
from tagc.ops.reference.sketch import positions as reference_positions
from tagc.ops.sketch import SketchLayout
from tagc.ops.symbols import SYMBOLS

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

CASES = case = Cases()


def check_ties(device, sizes):
    for n, capacity in sizes:
        p = problem("int32x1", BF16, BF16, n, "usual", W=1, hashes=4, seed=2)
        assert p.residual is not None
        p.grad.fill_(2.0)
        p.residual.zero_()
        p.grad[0, n // 2] = -3.0
        p.threshold.fill_(1.0)
        p.capacity = capacity
        done = check(p, device)
        assert done["counts"][0].tolist()[:3] == [n, n, capacity]
        kept = oracle.bits_of(done["index"][0, :-1].numpy(), n)
        assert kept == sorted([*range(capacity - 1), n // 2])


@case("ties stay in the order of the index")
def _(device):
    check_ties(device, ((3000, 137), (3000, 1), (70, 3)))


@case("ties that more programs than it has words come before")
def _(device):
    with mock.patch.object(kernels("trim"), "_WORDS", 4):  # 24 programs
        check_ties(device, ((3000, 700), (3000, 1400)))


@case("a program that trims several tiles")
def _(device):
    with mock.patch.multiple(kernels("trim"), _PROGRAMS=2, _WORDS=4):
        for symbol, residual in (("int32x1", BF16), ("int8x4", F32)):
            n = 3000 * SYMBOLS[symbol].lanes
            p = problem(symbol, BF16, residual, n, "usual", W=1, hashes=4, seed=4)
            p.grad.clamp_(-1, 1)
            assert p.residual is not None
            p.residual.zero_()
            p.threshold.fill_(1.0)
            done = check(p, device)
            assert done["counts"][0, 0] > p.capacity


@case("a program that counts as many sizes in one bin as it may")
def _(device):
    n = 2 * 32 * 1024 - 37
    for size in (1.0, 3.9):
        with mock.patch.object(kernels("trim"), "_PROGRAMS", 1):
            p = problem("int32x1", BF16, None, n, "empty", W=1, hashes=4)
            p.grad.fill_(size)
            p.grad[0, -9:] = 5.0
            p.threshold.fill_(1.0)
            p.capacity = 64
            assert check(p, device)["counts"][0, 0] == n


@case("sizes that differ in the last bit only")
def _(device):
    p = problem("int32x1", F32, None, 900, "usual", W=1, hashes=4)
    order = np.random.default_rng(0).permutation(900)
    bits = 0x40490000 + np.int32(order)
    p.grad[0] = torch.from_numpy(bits.astype(np.int32)).view(F32)
    p.threshold.fill_(1.0)
    p.capacity = 333
    done = check(p, device)
    assert (
        oracle.bits_of(done["index"][0, :-1].numpy(), 900) == np.nonzero(order >= 567)[0].tolist()
    )


@case("tables too small: what peels is right, the rest is counted and owed")
def _(device):
    unresolved = 0
    for symbol, grad, residual, room in (
        ("int8x4", F32, F32, 0.9), ("int8x4", F32, BF16, 1.1), ("int16x2", BF16, None, 1.0),
        ("int32x1", F32, F32, 0.5), ("int32x1", F32, BF16, 1.1),
    ):  # fmt: skip
        p = problem(symbol, grad, residual, 600, "all above", hashes=3, room=room)
        done = check(p, device)
        unresolved += int(done["stats"][1])
        assert done["stats"][1] < done["stats"][0]
    assert unresolved > 100


@case("more keys than the layout was made for")
def _(device):
    p = problem("int16x2", F32, F32, 1500, "room for all", hashes=4, room=2.0)
    p.layout = SketchLayout(
        numel=1500, symbol=p.layout.symbol, keys=5, hashes=4, partition=p.layout.partition
    )
    done = check(p, device)
    assert done["stats"][0] > 500
    assert done["stats"][1] == 0


@case("many words: several programs and blocks of the union")
def _(device):
    n = 36000
    layout = SketchLayout(numel=n, symbol=SYMBOLS["int32x1"], keys=64, hashes=4, partition=64)
    rng = np.random.default_rng(0)
    keys = np.sort(np.r_[rng.choice(n, 60, replace=False), 0, n - 1])
    present = torch.zeros(n, dtype=torch.bool)
    present[np.unique(keys)] = True
    symbols = torch.from_numpy(rng.integers(-(2**31), 2**31, n, dtype=np.int64)).to(I32)
    check_codec(layout, present, symbols, device)


@case("a million levels and more")
def _(device):
    # int32x1 sends integers beyond 2**23, where every float32 is one, and clips at its largest.
    p = problem("int32x1", F32, F32, 257, "all above", W=1, hashes=3)
    p.step = p.threshold = torch.tensor([2.0**-6])
    p.grad[0, :8] = torch.tensor([2.0**17 + 0.0078125, 2.0**30, -(2.0**31), 2.0**16, 0, 0, 0, 1])
    p.grad[0, 8:] *= 2.0**10
    assert check(p, device)["counts"][0, 3] > 0


@case("halves round to even")
def _(device):
    p = problem("int8x4", F32, F32, 64, "room for all", W=1)
    assert p.residual is not None
    p.residual.zero_()
    p.grad[0] = torch.arange(64) * 0.5 - 16
    p.step, p.threshold, p.levels = torch.ones(1), torch.ones(1), 127
    done = check(p, device, divisor=1)
    assert done["out"][:8].tolist() == [-16, -16, -15, -14, -14, -14, -13, -12]


@case("a bfloat16 residual stays finite")
def _(device):
    for symbol, mode in (("int8x4", "usual"), ("int32x1", "overflow"), ("int16x2", "room for all")):
        p = problem(symbol, F32, BF16, 300, mode, W=1, hashes=3)
        p.grad[0, ::2], p.grad[0, 1::6] = 3.4e38, -3.4e38
        p.residual = torch.zeros_like(p.grad).to(BF16)
        done = check(p, device)
        assert done["residual"].isfinite().all()
        assert done["residual"].abs().max() > 3.3e38
        assert not done["index"][0, -1]


@case("an estimate on top of the largest bfloat16 stays finite, infinity does not")
def _(device):
    p = problem("int32x1", F32, BF16, 400, "all above", hashes=3, room=0.3)
    p.step, p.threshold = torch.full((2,), 2.0**90), torch.full((2,), 2.0**90)
    p.grad.zero_()
    p.residual = torch.full((2, 400), 3.3895313892515355e38, dtype=BF16)
    assert check(p, device)["stats"][1] > 100


@case("bits past the last group mean nothing")
def _(device):
    p = problem("int16x2", F32, F32, 600, "usual", hashes=4)
    p.grad[:, -100:] = 0.0
    want = run_encode(reference, p, "cpu", False)
    index, cells = want["index"], want["cells"]
    assert index is not None
    assert cells is not None
    index[1, -2] |= torch.tensor(-1 << 300 % 32, dtype=I32)
    total = cells.sum(0, dtype=I32)
    decoded = run_decode(reference, index, total, p, F32, 2, "cpu", False)
    result = run_decode(kernels("ops"), index, total, p, F32, 2, device, False)
    for name, tensor in decoded.items():
        same(name, result[name], tensor)


@case("numbers next to zero")
def _(device):
    # Subnormal sums neither vanish nor round in any residual dtype's own way.
    for grad, residual in ((F32, F32), (BF16, BF16), (F16, F32), (F32, BF16)):
        p = problem("int8x4", grad, residual, 100, "usual", W=1)
        tiny = 2.0**-24 if grad == F16 else 2.0**-133
        p.grad[0] = (torch.arange(100) - 50) * tiny
        assert p.residual is not None
        p.residual[0] = (torch.arange(100) % 7) * 2.0**-133
        p.threshold, p.step = torch.tensor([2.0**-90]), torch.tensor([2.0**-94])
        check(p, device)


@case("insert and peel")
def _(device):
    rng = np.random.default_rng(3)
    for symbol, n, hashes, share in (
        ("int8x4", 1999, 4, 0.2), ("int16x2", 700, 3, 0.9), ("int32x1", 333, 5, 0.3),
        ("int8x4", 60, 1, 0.5), ("int32x1", 60, 1, 0.0),
    ):  # fmt: skip
        groups = -(-n // SYMBOLS[symbol].lanes)
        partition = groups if hashes == 1 else 64
        layout = SketchLayout(
            numel=n, symbol=SYMBOLS[symbol], keys=50, hashes=hashes, partition=partition
        )
        present = torch.from_numpy(rng.random(groups) < share)
        symbols = torch.from_numpy(rng.integers(-(2**31), 2**31, groups)).to(I32)
        check_codec(layout, present, symbols, device)


@case("peeling in few steps: handed over, spilt, finished by one program")
def _(device):
    peel, table = kernels("peel"), kernels("table")
    # Steps of all launches but the last, of the last, launches, room: 63 are the least.
    for limits, symbol in itertools.product(
        ((1, 1, 1, 256), (1, 1, 4, 256), (2, 3, 3, 63), (1, 0, 1, 63)), ("int8x4", "int32x1")
    ):
        steps, last, launches, room = limits
        with (
            mock.patch.object(peel, "launches", return_value=launches),
            mock.patch.object(peel, "_STEPS", steps), mock.patch.object(peel, "_NO_LIMIT", last),
            mock.patch.object(peel, "ROOM", room), mock.patch.object(table, "_CELLS", 512),
        ):  # fmt: skip
            p = problem(symbol, F32, F32, 1200, "all above", hashes=3, room=1.3)
            stats = check(p, device)["stats"]
            assert stats[0] > 100
            assert stats[1] < stats[0] // 2


def same_cells(layout: SketchLayout, seed: int, pairs: int) -> torch.Tensor:
    """Keys of ``pairs`` pairs that share all their cells."""
    every = torch.arange(layout.groups)
    where = reference_positions(every, torch.tensor([seed], dtype=I32), layout)
    code = (where * torch.tensor([1 << 20, 1])).sum(1)
    order = code.argsort()
    twice = (code[order][1:] == code[order][:-1]).nonzero().flatten()[:pairs]
    assert len(twice) == pairs
    return torch.cat((order[twice], order[twice + 1]))


@contextlib.contextmanager
def wide_programs() -> Iterator[None]:
    """When interpreted, few programs that do much at once; compiled, they would not fit."""
    table, peel, keys = kernels("table"), kernels("peel"), kernels("keys")
    with contextlib.ExitStack() as stack:
        if os.environ.get("TRITON_INTERPRET") == "1":
            for module, name, value in (
                (table, "_CELLS", 1 << 13), (peel, "SCAN_BLOCK", 1 << 15),
                (table, "PROGRAMS", 60), (keys, "_FILL", 1 << 14),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(module, name, value))
        yield


@case("packed entries: hashes name the keys, carries between fields do no harm")
def _(device):
    table = kernels("table")
    rng = np.random.default_rng(5)
    for symbol, hashes, partition, keys, pairs in (
        ("int8x4", 3, 65539, 1500, 0), ("int32x1", 2, 65539, 999, 7), ("int16x2", 2, 70001, 40, 10),
    ):  # fmt: skip
        lanes = SYMBOLS[symbol].lanes
        layout = SketchLayout(
            numel=200_000 * lanes - 1, symbol=SYMBOLS[symbol], keys=keys, hashes=hashes,
            partition=partition,
        )  # fmt: skip
        assert table.packed(layout)
        present = torch.zeros(layout.groups, dtype=torch.bool)
        present[rng.choice(layout.groups, keys, replace=False)] = True
        present[[0, layout.groups - 1]] = True
        if pairs:
            present[same_cells(layout, 8, pairs)] = True
        symbols = torch.from_numpy(rng.integers(-(2**31), 2**31, layout.groups)).to(I32)
        # Half of them in the second rank's bitmap, some in both.
        turn = torch.from_numpy(rng.integers(1, 4, layout.groups))
        index = torch.zeros(2, layout.index_words, dtype=I32)
        for rank in (0, 1):
            index[rank, :-1] = to_bitmap(present & ((turn & (1 << rank)) != 0))
        cells = torch.zeros(layout.cells, dtype=I32)
        seed = torch.tensor([8], dtype=I32)
        reference.insert(symbols, to_bitmap(present), seed, cells, layout=layout)
        p = Problem(
            torch.zeros(2, 0), torch.full((2, layout.numel), 0.25), torch.ones(2),
            torch.full((2,), 0.5), seed, layout, 1, keys,
        )  # fmt: skip
        want = run_decode(reference, index, cells, p, BF16, 2, "cpu", False)
        with wide_programs():
            got = run_decode(kernels("ops"), index, cells, p, BF16, 2, device, False)
        for name, tensor in want.items():
            same(name, canonical(got[name]), canonical(tensor))
        stats = want["stats"]
        assert stats is not None
        assert stats[0] == present.sum()
        assert (stats[1] >= 2 * pairs) if pairs else (stats[1] == 0)


@case("the least partition of packed entries")
def _(device):
    for partition, expected in ((65539, True), (65538, False)):
        layout = SketchLayout(
            numel=1000, symbol=SYMBOLS["int8x4"], keys=9, hashes=3, partition=partition
        )
        assert kernels("table").packed(layout) is expected
        # The most hashes of a cell, and 2 by which the first may be missed.
        assert expected is False or -(-(2**32) // partition) + 2 <= 2**16


@case("no group, and every group of many ranks")
def _(device):
    for symbol, hashes in (("int8x4", 3), ("int32x1", 6), ("int32x1", 4), ("int16x2", 1)):
        lanes = SYMBOLS[symbol].lanes
        n = 400 * lanes - (lanes - 1)
        for W, every in ((5, True), (1, False), (5, False)):
            partition = -(-n // lanes) if hashes == 1 else 64
            layout = SketchLayout(
                numel=n, symbol=SYMBOLS[symbol], keys=20, hashes=hashes, partition=partition
            )
            p = Problem(
                torch.full((W, n), 3.0 if every else 0.0), torch.zeros(W, n), torch.ones(W),
                torch.ones(W), torch.tensor([W], dtype=I32), layout, layout.symbol.levels(W),
                layout.groups,
            )  # fmt: skip
            done = check(p, device, divisor=W)
            keys = layout.groups if every else 0
            assert done["stats"][0] == keys
            assert done["counts"][:, 2].tolist() == [keys] * W
            if hashes == 3 and every:  # 400 keys in 192 cells
                assert done["stats"][1] > 300


# --- interpreted in a process of its own, compiled and emulated, natively ----------------------

outcome, test_interpreted, test_compiled, test_on_a_gpu = CASES.tests(
    __file__, "insert and peel", edges=True
)


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
