"""The Triton operators of sketches against the reference, to the bit.

Every case runs twice over: interpreted on the CPU, in one process of its own (Triton decides when
it is imported whether it interprets), and natively where there is a GPU (``-m gpu``).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.kernel_cases import Cases
from support.sketch_kernels import (
    BF16,
    F32,
    check,
    problem,
    share,
)

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")


# --- cases: they take a device, and each has a name ---------------------------------------------

CASES = case = Cases()


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


@case("a sum that overflows is not finite either")
def _(device):
    p = problem("int16x2", F32, F32, 130, "usual", hashes=3)
    assert p.residual is not None
    p.grad[1, 7], p.residual[1, 7] = 3e38, 3e38
    assert check(p, device)["index"][:, -1].tolist() == [0, 1]


# --- interpreted in a process of its own, compiled and emulated, natively ----------------------

outcome, test_interpreted, test_compiled, test_on_a_gpu = CASES.tests(__file__, edges=True)


def test_the_package_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import tagc.triton_kernels"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
