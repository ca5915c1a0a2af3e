"""The Triton operator that undoes the lag of error feedback against the reference, to the bit.

Every case runs interpreted on the CPU and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support import oracle
from support.kernel_cases import Cases, canonical, check_margins, kernels, placed, same
from support.sync import synchronizing_raises
from tagc.ops import reference

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES = case = Cases()


def check(n: int, dtype: torch.dtype, share: float, device: str, *, aligned: bool = False) -> None:
    """Two steps, of random sums with some that are not finite."""
    rng = np.random.default_rng(n)
    weights = torch.tensor([1 - share, share])
    last = oracle.values((n,), rng).float()
    state = {"cpu": placed(last, "cpu", aligned), "kernel": placed(last, device, aligned)}
    for _ in range(2):
        decoded = oracle.values((n,), rng).float()
        if n > 4:
            decoded[n // 2 : n // 2 + 3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
            decoded[0] = -0.0
        outs = {}
        for name, ops, where in (
            ("cpu", reference, "cpu"), ("kernel", kernels("ops"), device)
        ):  # fmt: skip
            out = placed(oracle.poisoned(n, dtype=dtype), where, aligned)
            sums = placed(decoded, where, aligned)
            ops.undo_lag(sums, state[name], out, placed(weights, where, True))
            same("decoded", sums, decoded)
            check_margins(out)
            check_margins(state[name])
            outs[name] = out
        same("out", canonical(outs["kernel"]), canonical(outs["cpu"]))
        same("sent", state["kernel"], state["cpu"])


for row in [(F32, 0.65), (BF16, 0.1), (F16, 1.0)]:
    name = " ".join(str(v).removeprefix("torch.") for v in row)

    @case(name)
    def _(device, row=row):
        for n in (1, 31, 2048, 5003):
            check(n, row[0], row[1], device)


@case("aligned")
def _(device):
    for dtype in (F32, BF16):
        check(6144, dtype, 0.35, device, aligned=True)


@case("nothing at all")
def _(device):
    check(0, BF16, 0.5, device)


@case("in place")
def _(device):
    rng = np.random.default_rng(3)
    decoded, last = oracle.values((3000,), rng).float(), oracle.values((3000,), rng).float()
    weights, results = torch.tensor([0.5, 0.5]), []
    for ops, where in ((reference, "cpu"), (kernels("ops"), device)):
        x, sent = placed(decoded, where, True), placed(last, where, True)
        ops.undo_lag(x, sent, x, placed(weights, where, True))
        same("sent", sent, decoded)
        results.append(x)
    same("out", results[1], results[0])


# --- interpreted in a process of its own, compiled and emulated, natively ----------------------

outcome, test_interpreted, test_compiled, test_on_a_gpu = CASES.tests(
    __file__, "bfloat16 0.1", "in place"
)

gpu = pytest.mark.gpu


@gpu
def test_nothing_waits_for_the_device():
    decoded, sent, out = (torch.ones(5000, device="cuda") for _ in range(3))
    weights = torch.tensor([0.5, 0.5], device="cuda")
    kernels("ops").undo_lag(decoded, sent, out, weights)
    with synchronizing_raises():
        kernels("ops").undo_lag(decoded, sent, out, weights)


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
