"""The Triton operators of sketches where it gets tight, against the reference, to the bit.

Every case runs interpreted on the CPU and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from support import oracle
from support.kernel_cases import Cases, interpreted, kernels, same
from support.sketch_kernels import (
    BF16,
    F16,
    F32,
    I32,
    check,
    check_codec,
    problem,
    run_decode,
    run_encode,
)
from tagc.ops import reference
from tagc.ops.sketch import SketchLayout
from tagc.ops.symbols import SYMBOLS

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

CASES = case = Cases()


@case("ties stay in the order of the index")
def _(device):
    for n, capacity in ((3000, 137), (3000, 1), (70, 3)):
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
        ("int32x1", F32, F32, 0.5), ("float32", F32, F32, 0.9), ("float32", F32, BF16, 1.1),
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
        ("int8x4", 1999, 4, 0.2), ("int16x2", 700, 3, 0.9), ("float32", 333, 5, 0.3),
        ("int8x4", 60, 1, 0.5), ("float32", 60, 1, 0.0),
    ):  # fmt: skip
        groups = -(-n // SYMBOLS[symbol].lanes)
        partition = groups if hashes == 1 else 64
        layout = SketchLayout(
            numel=n, symbol=SYMBOLS[symbol], keys=50, hashes=hashes, partition=partition
        )
        present = torch.from_numpy(rng.random(groups) < share)
        symbols = torch.from_numpy(rng.integers(-(2**31), 2**31, groups)).to(layout.symbol.dtype)
        if not layout.symbol.integer:
            symbols = (symbols * 2.0**-20).round()
        check_codec(layout, present, symbols, device)


@case("one program can finish peeling alone")
def _(device):
    for wide, symbol in itertools.product((0, 1), ("int8x4", "float32")):
        with (
            mock.patch.object(kernels("peel"), "launches", return_value=wide),
            mock.patch.object(kernels("peel_float"), "launches", return_value=wide),
        ):
            p = problem(symbol, F32, F32, 1200, "all above", hashes=3, room=1.3)
            assert check(p, device)["stats"][0] > 100


@case("the same launches give the same bits")
def _(device):
    ops = kernels("ops")
    p = problem("int8x4", F32, BF16, 2051, "overflow", hashes=4)
    first, second = (run_encode(ops, p, device, False) for _ in range(2))
    for name, tensor in first.items():
        assert tensor is not None
        same(name, second[name], tensor.cpu())


# --- in a process of its own ------------------------------------------------------------------


@pytest.fixture(scope="session")
def outcome(request, tmp_path_factory) -> dict[str, str | None]:
    return interpreted(__file__, request, tmp_path_factory.mktemp("triton"))


@pytest.mark.xdist_group("interpreted sketches' edges")
@pytest.mark.device
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES.interpreted())
def test_interpreted(outcome, name):
    failure = outcome[name]
    assert failure is None, failure


# --- natively ---------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    CASES[name]("cuda")


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
