"""The Triton operators of sketches against the reference, to the bit.

Every case runs twice over: interpreted on the CPU, in one process of its own (Triton decides when
it is imported whether it interprets), and natively where there is a GPU (``-m gpu``).
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import oracle
from support.kernel_cases import Cases
from support.sketch_kernels import (
    BF16,
    F16,
    F32,
    I32,
    MODES,
    Problem,
    check,
    problem,
    share,
)
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")


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


for row in (
    ("int8x4", F32, F32, 4099, "usual"), ("int8x4", BF16, BF16, 2051, "room for all"),
    ("int16x2", F16, None, 1031, "overflow"), ("int32x1", F32, BF16, 2600, "nothing fits"),
    ("int32x1", BF16, F32, 700, "usual"), ("int8x4", F32, BF16, 33, "usual"),
):  # fmt: skip

    @case(f"a support of {row[3]} in {row[0]}")
    def _(device, row=row):
        symbol, grad, residual, n, mode = row
        p = share(problem(symbol, grad, residual, n, mode, hashes=4))
        done = check(p, device)
        assert p.support is not None
        kept = sum(len(oracle.bits_of(row.numpy(), p.layout.groups)) for row in p.support)
        assert done["counts"][:, 2].sum() == kept


@case("an aligned support")
def _(device):
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
    layout, one = plan_layout(0, SYMBOLS["int8x4"], 10), torch.ones(2)
    nothing, seed = torch.zeros(2, 0), torch.zeros(1, dtype=I32)
    check(Problem(nothing, nothing.clone(), one, one, seed, layout, 7, 0), device)


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


# --- interpreted in a process of its own, compiled and emulated, natively ----------------------

FEW = (
    "int8x4 bfloat16 bfloat16 bfloat16 4099 overflow",
    "int16x2 bfloat16 float32 float32 1031 usual",
    "aligned rows",
)
MORE = ("int16x2 float16 bfloat16 float16 515 overflow",)
outcome, test_interpreted, test_compiled, test_on_a_gpu = CASES.tests(__file__, *FEW, more=MORE)


def test_the_package_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import tagc.triton_kernels"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
