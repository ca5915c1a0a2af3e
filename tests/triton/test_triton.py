"""The Triton operators against the reference, to the bit.

Every case runs twice over: interpreted on the CPU, in one process of its own (Triton decides when
it is imported whether it interprets), and natively where there is a GPU (``-m gpu``).
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from support import oracle
from support.kernel_cases import Cases, canonical, check_margins, interpreted, kernels, placed, same
from support.sync import synchronizing_raises
from tagc.bitmap import to_bitmap
from tagc.layout import SketchLayout, plan_layout
from tagc.ops import reference
from tagc.quantize import quantization_step
from tagc.symbols import SYMBOLS

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
F32, BF16, F16, I32 = torch.float32, torch.bfloat16, torch.float16, torch.int32


@dataclass
class Problem:
    """Arguments of encode for ``W`` destinations, on the CPU."""

    grad: Tensor
    residual: Tensor | None
    threshold: Tensor
    step: Tensor
    seed: Tensor
    layout: SketchLayout
    levels: int
    capacity: int
    support: Tensor | None = None


# share of the groups above the threshold, share that the capacity holds
MODES = {
    "usual": (0.1, 0.2),
    "overflow": (0.5, 0.2),
    "nothing fits": (0.3, 0.0),
    "empty": (0.0, 0.1),
    "all above": (1.0, 0.5),
    "room for all": (0.2, 1.0),
}


def problem(symbol, grad_dtype, residual_dtype, n, mode, *, W=2, hashes=0, room=3.0, seed=0):
    """``hashes`` and ``room``, cells per kept group, make a layout; 0 takes the planned one."""
    rng = np.random.default_rng([n, seed])
    above, keep = MODES[mode]
    symbol = SYMBOLS[symbol]

    def draw() -> Tensor:
        x = oracle.values((W, n), rng)
        # Sums of multiples of 1/64 are exact: then float32 symbols agree to the bit as well.
        return x if symbol.integer else (x.clamp(-512, 512) * 64).round() / 64

    grad = draw().to(grad_dtype)
    residual = None if residual_dtype is None else draw().to(residual_dtype)
    groups = -(-n // symbol.lanes)
    x = grad.float() if residual is None else grad.float() + residual.float()
    whole = torch.nn.functional.pad(x, (0, groups * symbol.lanes - n)).unflatten(1, (groups, -1))
    size = whole.abs().amax(-1).sort(1, descending=True).values
    threshold = size[:, min(groups - 1, round(above * groups))].clamp(min=2.0**-20)
    if mode == "empty":
        threshold = torch.full((W,), 2.0**20)
    capacity = int(keep * groups)
    levels = symbol.levels(W)
    keys = W * capacity
    layout = plan_layout(n, symbol, keys)
    if hashes:
        cells = max(32, int(room * min(keys, groups)))
        layout = SketchLayout(
            numel=n, symbol=symbol, keys=keys, hashes=hashes, partition=-(-cells // hashes)
        )
    return Problem(
        grad, residual, threshold, quantization_step(threshold, symbol, levels),
        torch.from_numpy(rng.integers(-(2**31), 2**31, 1, dtype=np.int32)),
        layout, levels, capacity,
    )  # fmt: skip


def run_encode(ops, p: Problem, device: str, aligned: bool) -> dict[str, Tensor | None]:
    W, layout = p.grad.shape[0], p.layout
    out = {
        "index": oracle.poisoned(W, layout.index_words, dtype=I32),
        "cells": oracle.poisoned(W, layout.cells, dtype=layout.symbol.dtype),
        "counts": oracle.poisoned(W, 4, dtype=I32),
        "residual": p.residual,
    }
    out = {k: placed(v, device, aligned) for k, v in out.items()}
    grad, support = placed(p.grad, device, aligned), placed(p.support, device, aligned)
    ops.encode(
        grad, out["residual"], p.threshold.to(device), p.step.to(device), p.seed.to(device),
        out["index"], out["cells"], out["counts"],
        layout=layout, levels=p.levels, capacity=p.capacity, support=support,
    )  # fmt: skip
    same("gradient", grad, p.grad)
    same("support", support, p.support)
    for tensor in out.values():
        check_margins(tensor)
    return out


def run_decode(
    ops, index, cells, p: Problem, dtype, divisor, device: str, aligned: bool
) -> dict[str, Tensor | None]:
    out = {
        "out": oracle.poisoned(p.layout.numel, dtype=dtype),
        "residual": None if p.residual is None else p.residual[0],
        "stats": oracle.poisoned(2, dtype=I32),
    }
    out = {k: placed(v, device, aligned) for k, v in out.items()}
    ops.decode(
        placed(index, device, aligned), placed(cells, device, aligned), p.step[:1].to(device),
        p.seed.to(device), out["out"], out["residual"], out["stats"],
        layout=p.layout, divisor=divisor,
    )  # fmt: skip
    for tensor in out.values():
        check_margins(tensor)
    return out


def check(p: Problem, device: str, *, out=F32, divisor=3, aligned=False) -> dict[str, Any]:
    """Encode and decode against the reference; the results, the residual after encode."""
    ops = kernels("ops")
    want = run_encode(reference, p, "cpu", aligned)
    got = run_encode(ops, p, device, aligned)
    for name, tensor in want.items():
        same(name, got[name], tensor)
    index, cells = want["index"], want["cells"]
    assert index is not None
    assert cells is not None
    total = cells.sum(0, dtype=p.layout.symbol.dtype)
    decoded = run_decode(reference, index, total, p, out, divisor, "cpu", aligned)
    result = run_decode(ops, index, total, p, out, divisor, device, aligned)
    for name, tensor in decoded.items():
        same(name, canonical(result[name]), canonical(tensor))
    return {**decoded, **want}


# --- cases: they take a device, and each has a name ---------------------------------------------

CASES = case = Cases()

# symbol, gradient, residual, n, mode, hashes, output, divisor: every pair of the first three.
GRID = [
    ("int8x4", F32, F32, 2051, "overflow", 4, F32, 3),
    ("int8x4", BF16, BF16, 4099, "overflow", 3, BF16, 2),
    ("int8x4", F16, None, 1027, "usual", 5, F16, 1),
    ("int8x4", F32, BF16, 129, "room for all", 0, BF16, 5),
    ("int16x2", F32, None, 2047, "overflow", 3, F32, 2),
    ("int16x2", BF16, F32, 1031, "usual", 4, F32, 3),
    ("int16x2", F16, BF16, 515, "overflow", 6, F16, 7),
    ("int32x1", F32, BF16, 1537, "overflow", 4, F32, 1),
    ("int32x1", BF16, None, 777, "overflow", 3, BF16, 3),
    ("int32x1", F16, F32, 300, "all above", 0, F32, 2),
    ("float32", F32, F32, 700, "overflow", 4, F32, 3),
    ("float32", BF16, BF16, 333, "usual", 5, BF16, 1),
    ("float32", F16, None, 129, "room for all", 3, F32, 2),
]
for row in GRID:
    symbol, grad, residual, n, mode, hashes, out, divisor = row
    dtypes = " ".join(str(t).removeprefix("torch.") for t in (grad, residual, out))

    @case(f"{symbol} {dtypes} {n} {mode}")
    def _(device, row=row):
        symbol, grad, residual, n, mode, hashes, out, divisor = row
        p = problem(symbol, grad, residual, n, mode, hashes=hashes)
        done = check(p, device, out=out, divisor=divisor)
        counts = done["counts"]
        if mode == "overflow":
            assert (counts[:, 0] > p.capacity).all()
            assert (counts[:, 2] == p.capacity).all()
        if mode == "room for all":
            assert (counts[:, 2] == counts[:, 1]).all()


for mode in MODES:

    @case(f"tiny sizes, {mode}")
    def _(device, mode=mode):
        symbols = itertools.cycle(SYMBOLS)
        for n in (1, 3, 4, 31, 33, 127, 129):
            check(problem(next(symbols), F32, BF16, n, mode), device, divisor=2)


def share(p: Problem, seed: int = 0) -> Problem:
    """With a support of a third of the groups, chosen by nobody."""
    rng, groups = np.random.default_rng(seed), p.layout.groups
    p.support = to_bitmap(torch.from_numpy(rng.random((p.grad.shape[0], groups)) < 1 / 3))
    if groups % 32:  # bits past the last group mean nothing
        p.support[:, -1] |= torch.tensor(-1 << groups % 32, dtype=I32)
    return p


@case("a support")
def _(device):
    for symbol, grad, residual, n, mode in (
        ("int8x4", F32, F32, 4099, "usual"), ("int8x4", BF16, BF16, 2051, "room for all"),
        ("int16x2", F16, None, 1031, "overflow"), ("int32x1", F32, BF16, 2600, "nothing fits"),
        ("float32", BF16, F32, 700, "usual"), ("float32", F32, BF16, 33, "usual"),
    ):  # fmt: skip
        p = share(problem(symbol, grad, residual, n, mode, hashes=4))
        done = check(p, device)
        assert p.support is not None
        kept = sum(len(oracle.bits_of(row.numpy(), p.layout.groups)) for row in p.support)
        assert done["counts"][:, 2].sum() == kept
    check(share(problem("int8x4", F32, F32, 1024, "usual")), device, aligned=True)


@case("groups of a support that are not finite are not sent, and poison the step")
def _(device):
    for symbol, residual in (("int8x4", F32), ("int16x2", BF16), ("int8x4", None)):
        p = share(problem(symbol, F32, residual, 2600, "usual", W=3, hashes=4, seed=1))
        assert p.support is not None
        p.support[0, 0], p.support[1, 0] = -1, 0
        p.grad[0, 3], p.grad[0, 400], p.grad[1, 5] = float("nan"), float("inf"), -float("inf")
        done = check(p, device)
        assert done["index"][:, -1].tolist() == [1, 1, 0]
        # Every group of the first word but the one that holds the third element.
        assert done["index"][0, 0] == ~(1 << 3 // p.layout.symbol.lanes)
        assert done["out"].isnan().all()
        if residual is not None:
            assert done["residual"].isfinite().all()


@case("nothing at all")
def _(device):
    for symbol in ("int8x4", "float32"):
        check(problem_of_size_zero(symbol), device)


def problem_of_size_zero(symbol: str) -> Problem:
    layout = plan_layout(0, SYMBOLS[symbol], 10)
    one = torch.ones(2)
    return Problem(
        torch.zeros(2, 0), torch.zeros(2, 0), one, one, torch.zeros(1, dtype=I32), layout, 7, 0
    )


@case("aligned rows")
def _(device):
    for symbol, grad, residual in (("int8x4", F32, F32), ("int32x1", BF16, BF16)):
        p = problem(symbol, grad, residual, 1024, "overflow", hashes=4)
        check(p, device, aligned=True, divisor=4)


@case("non-finite gradients poison the step and spare the residual")
def _(device):
    for residual, out in ((F32, F32), (BF16, BF16), (None, F16)):
        # More than one program, the last of which covers the poison word's place, too.
        p = problem("int8x4", F32, residual, 2600, "usual", W=3, hashes=4, seed=1)
        p.grad[0, 3], p.grad[0, 400], p.grad[0, 516] = float("nan"), float("inf"), -float("inf")
        done = check(p, device, out=out)
        assert done["index"][:, -1].tolist() == [1, 0, 0]
        assert done["out"].isnan().all()


@case("a sum that overflows is not finite either")
def _(device):
    p = problem("int16x2", F32, F32, 130, "usual", hashes=3)
    assert p.residual is not None
    p.grad[1, 7], p.residual[1, 7] = 3e38, 3e38
    assert check(p, device)["index"][:, -1].tolist() == [0, 1]


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
    with mock.patch.object(kernels("trim"), "_PROGRAMS", 2):
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


def check_codec(layout: SketchLayout, present: Tensor, symbols: Tensor, device: str) -> Tensor:
    """``insert`` and ``peel`` against the reference; what could not be recovered."""
    ops = kernels("ops")
    index, seed = to_bitmap(present), torch.tensor([-7], dtype=I32)
    tail = present.numel() % 32
    if tail:
        index[-1] |= torch.tensor(-1 << tail, dtype=I32)  # bits past the last group mean nothing
    want = oracle.poisoned(layout.cells, dtype=symbols.dtype)
    reference.insert(symbols, index, seed, want, layout=layout)
    cells = oracle.poisoned(layout.cells, dtype=symbols.dtype).to(device)
    ops.insert(symbols.to(device), index.to(device), seed.to(device), cells, layout=layout)
    same("cells", cells, want)
    peeled, stuck = reference.peel(want, index, seed, layout=layout)
    got, got_stuck = ops.peel(cells, index.to(device), seed.to(device), layout=layout)
    same("symbols", got, peeled)
    same("unresolved", got_stuck, stuck)
    same("cells after peeling", cells, want)
    return stuck


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
def outcome(tmp_path_factory) -> dict[str, str | None]:
    return interpreted(__file__, tmp_path_factory.mktemp("triton"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_interpreted(outcome, name):
    failure = outcome[name]
    assert failure is None, failure


def test_the_package_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import tagc.triton_kernels"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- natively ---------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    CASES[name]("cuda")


@gpu
def test_peeling_is_over_before_the_last_launch():
    table = kernels("table")
    rng = np.random.default_rng(0)
    for symbol, keys in (("int8x4", 200), ("int8x4", 5000), ("int8x4", 300_000), ("float32", 5000)):
        layout = plan_layout(4 * keys * SYMBOLS[symbol].lanes * 4, SYMBOLS[symbol], keys)
        assert not layout.direct
        present = torch.zeros(layout.groups, dtype=torch.bool)
        present[rng.choice(layout.groups, keys, replace=False)] = True
        symbols = torch.from_numpy(rng.integers(-1000, 1000, layout.groups)).to(layout.symbol.dtype)
        assert not check_codec(layout, present, symbols, "cuda").any()
        device = torch.device("cuda", torch.cuda.current_device())
        flags = table.table_of(layout, device).flags
        last = kernels("peel" if layout.symbol.integer else "peel_float").launches(layout)
        assert flags[last] == 0, f"{keys} keys of {symbol} needed the last program"


def gpu_step(p: Problem):
    """Device arguments of one encode and one decode of row 0, and a function that runs both."""
    ops, layout = kernels("ops"), p.layout
    W = p.grad.shape[0]
    t = {
        "grad": p.grad.cuda(),
        "residual": None if p.residual is None else p.residual.cuda(),
        "threshold": p.threshold.cuda(), "step": p.step.cuda(), "seed": p.seed.cuda(),
        "index": oracle.poisoned(W, layout.index_words, dtype=I32).cuda(),
        "cells": oracle.poisoned(W, layout.cells, dtype=layout.symbol.dtype).cuda(),
        "counts": oracle.poisoned(W, 4, dtype=I32).cuda(),
        "total": oracle.poisoned(layout.cells, dtype=layout.symbol.dtype).cuda(),
        "out": oracle.poisoned(layout.numel, dtype=F32).cuda(),
        "stats": oracle.poisoned(2, dtype=I32).cuda(),
    }  # fmt: skip

    def run() -> None:
        ops.encode(
            t["grad"], t["residual"], t["threshold"], t["step"], t["seed"], t["index"],
            t["cells"], t["counts"], layout=layout, levels=p.levels, capacity=p.capacity,
        )  # fmt: skip
        torch.sum(t["cells"], 0, dtype=layout.symbol.dtype, out=t["total"])
        ops.decode(
            t["index"], t["total"], t["step"][:1], t["seed"], t["out"],
            None if t["residual"] is None else t["residual"][0], t["stats"],
            layout=layout, divisor=3,
        )  # fmt: skip

    return t, run


@gpu
@pytest.mark.parametrize("symbol", ["int8x4", "float32"])
def test_nothing_waits_for_the_device(symbol):
    _, run = gpu_step(problem(symbol, F32, F32, 5000, "overflow", hashes=4))
    run()
    with synchronizing_raises():
        run()


@gpu
@pytest.mark.parametrize("symbol", ["int8x4", "int16x2", "float32"])
def test_a_cuda_graph_holds_a_step(symbol):
    p = problem(symbol, F32, BF16, 5003, "overflow", hashes=4)
    t, run = gpu_step(p)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in (5, 6):
        other = problem(symbol, F32, BF16, 5003, "overflow", hashes=4, seed=seed)
        for name in ("grad", "residual", "threshold", "step", "seed"):
            t[name].copy_(getattr(other, name))
        graph.replay()
        other.layout = p.layout
        want = run_encode(reference, other, "cpu", True)
        assert want["index"] is not None
        assert want["cells"] is not None
        assert want["residual"] is not None
        total = want["cells"].sum(0, dtype=p.layout.symbol.dtype)
        other.residual = want["residual"]
        decoded = run_decode(reference, want["index"], total, other, F32, 3, "cpu", True)
        for name in ("index", "cells", "counts"):
            same(name, t[name], want[name])
        for name in ("out", "stats"):
            same(name, t[name], decoded[name])
        same("residual", t["residual"][0], decoded["residual"])
        same("residual of others", t["residual"][1:], want["residual"][1:])


@gpu
def test_more_than_two_to_the_31_elements():
    n, W = (1 << 31) + 1040, 2
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of free device memory")
    ops, symbol = kernels("ops"), SYMBOLS["int8x4"]
    layout = plan_layout(n, symbol, 1000)
    where = torch.tensor([0, 5, (1 << 30) + 1, (1 << 31) - 1, 1 << 31, n - 1], device="cuda")
    grad = torch.zeros(W, n, dtype=BF16, device="cuda")
    grad[:, where] = torch.arange(1, 7, dtype=BF16, device="cuda")
    residual = torch.zeros(W, n, dtype=BF16, device="cuda")
    one, seed = torch.ones(W, device="cuda"), torch.tensor([3], dtype=I32, device="cuda")
    index = torch.empty(W, layout.index_words, dtype=I32, device="cuda")
    cells = torch.empty(W, layout.cells, dtype=I32, device="cuda")
    counts = torch.empty(W, 4, dtype=I32, device="cuda")
    ops.encode(
        grad, residual, one, one, seed, index, cells, counts,
        layout=layout, levels=63, capacity=500,
    )  # fmt: skip
    groups = int((where // 4).unique().numel())
    assert counts.tolist() == [[groups, groups, groups, 0]] * W
    out, stats = torch.full((n,), float("nan"), dtype=BF16, device="cuda"), torch.empty_like(seed)
    stats = torch.empty(2, dtype=I32, device="cuda")
    ops.decode(
        index, cells.sum(0, dtype=I32), one[:1], seed, out, residual[0], stats,
        layout=layout, divisor=W,
    )  # fmt: skip
    assert stats.tolist() == [groups, 0]
    assert out[where].tolist() == [1, 2, 3, 4, 5, 6]
    out[where] = 0
    assert not out.any()
    assert not residual.any()
    kernels("scratch").release()


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
