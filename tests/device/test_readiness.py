"""On an emulated device `wrap` compiles the kernels, runs them, and sees a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tagc
from tagc.handle.collectives import make_ready
from tagc.ops import get_ops
from tagc.plan import Plan, UnitInfo, UnitParam, build_plan
from tagc.selfcheck import KernelError
from tagc.selfcheck.inputs import PLACEMENTS

from .ptx.launch import emulated

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
CPU = torch.device("cpu")


def plan() -> Plan:
    """A unit with a segment in 4 bits, whose parameters travel in 8."""
    params = (
        UnitParam(name="a.weight", shape=(32, 64), columns=1024),
        UnitParam(name="b.bias", shape=(32,), columns=16),
    )
    info = UnitInfo(name="unit", world_size=2, dtype=torch.bfloat16, params=params)
    rule: dict[str, Any] = {
        "when": {"name": "a.*"},
        "codec": {"kind": "quantized", "bits": 4, "block": 32},
    }
    feedback = {"kind": "residual", "dtype": "bfloat16"}
    eight = {"codec": {"kind": "quantized", "bits": 8}}
    policy = {
        "schema": 1,
        "gradients": [rule | {"feedback": feedback}],
        "parameters": [rule | eight],
    }
    return build_plan([info], tagc.Policy.load(policy), gathers=[info])


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    monkeypatch.setattr("tagc.selfcheck.checking._PASSED", set())


def test_kernels_are_compiled_and_checked_before_the_first_step():
    with emulated() as launches:
        text = make_ready(plan(), get_ops("cuda", "triton"), CPU, shown=False)
    assert text is not None
    assert text.startswith("kernels: 4 kinds of calls give the reference's bits")
    # Of gradients and of parameters, wherever tensors lie.
    each = 2 * len(PLACEMENTS)
    assert launches == {"quantize_kernel": each, "dequantize_kernel": each}


def test_a_wrong_kernel_is_refused():
    def wrong(ptx: str) -> str:
        return ptx.replace("min.f32", "max.f32", 1)

    with (
        emulated(change=wrong),
        pytest.raises(KernelError, match=r"quantize_and_put\(.*: aligned: \d+ of \d+ elements of"),
    ):
        make_ready(plan(), get_ops("cuda", "triton"), CPU, shown=False)
