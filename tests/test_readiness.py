"""On its device `wrap` takes the fast kernels after a check, and refuses them if they are wrong.

A stand-in takes the place of the kernels for GPUs: the reference, which "compiles" while it is
rehearsed.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tagc
from support.distributed import run_ranks
from support.small_net import local_grads, loss_of
from support.states import wrapped
from tagc.handle.collectives import make_ready
from tagc.ops import get_ops, reference
from tagc.selfcheck.calls import OPERATORS
from tagc.selfcheck.inputs import PLACEMENTS


def policy_of(codec: dict[str, Any], **feedback: Any) -> dict[str, Any]:
    rule = {
        "when": {"name": ["first*weight", "second*weight"]},
        "codec": codec,
        "feedback": {"kind": "residual"} | feedback,
    }
    return {"schema": 1, "gradients": [rule]}


POLICY = policy_of({"kind": "quantized", "bits": 4, "block": 32})
SELECTING = policy_of({"kind": "sketch", "density": 0.3})


class Standin(ModuleType):
    """Operators of a device that there is not.

    Attributes:
        compiled, ran: names of the operators that were.
    """

    def __init__(self, wrong: str | None) -> None:
        super().__init__("tagc.triton_kernels.ops")
        self.compiled: list[str] = []
        self.ran: list[str] = []
        self._compiling = False
        for name in OPERATORS:
            setattr(self, name, self._operator(name, getattr(reference, name), name == wrong))
        self.release = lambda: None

    @contextlib.contextmanager
    def compiling_only(self) -> Iterator[None]:
        self._compiling = True
        yield
        self._compiling = False

    def recorded(self, operator: Any) -> None:
        """Nothing is."""

    def _operator(self, name: str, right: Any, wrong: bool) -> Any:
        def operator(*args: Any, **kwargs: Any) -> Any:
            (self.compiled if self._compiling else self.ran).append(name)
            if self._compiling:
                return None
            returned = right(*args, **kwargs)
            if wrong:
                inspect.signature(right).bind(*args, **kwargs).arguments["state"][..., 0] = 7.0
            return returned

        operator.__wrapped__ = right  # type: ignore[attr-defined]  # for its signature
        return operator


@contextlib.contextmanager
def device(wrong: str | None = None) -> Iterator[Standin]:
    """Inside, the CPU has kernels that are checked."""
    standin = Standin(wrong)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TAGC_OPS", raising=False)
        patch.setattr("tagc.ops.implementations._FASTEST", {"cpu": "triton"})
        patch.setattr("tagc.ops.implementations._RUNS_ON", {"triton": "cpu"})
        patch.setitem(sys.modules, "tagc.triton_kernels.ops", standin)
        patch.setattr("tagc.selfcheck.checking._PASSED", set())
        yield standin


def gradients(model: Any, rank: int) -> dict[str, Tensor]:
    for step in range(2):
        loss_of(model, rank, step).backward()
    return local_grads(model)


def trained(rank: int) -> tuple[str, list[str], list[str]]:
    want = gradients(wrapped(POLICY, ops="reference"), rank)
    with device() as standin:
        model = wrapped(POLICY)
        compressor = tagc.compressor(model)
        assert compressor is not None
        compiled, checked = list(standin.compiled), list(standin.ran)
        got = gradients(model, rank)
    assert standin.compiled == compiled
    assert len(standin.ran) > len(checked)
    assert all(torch.equal(got[name], want[name]) for name in want)
    return str(compressor.plan()), compiled, checked


def test_wrap_takes_the_kernels_after_a_check():
    for plan, compiled, checked in run_ranks(trained, 2):
        assert "- kernels: 8 kinds of calls give the reference's bits (device cpu" in plan
        assert set(compiled) == {
            "quantize", "quantize_and_put", "dequantize", "dequantize_and_sum"
        }  # fmt: skip
        # Two units with segments of their own sizes, wherever tensors lie.
        assert len(checked) == 8 * len(PLACEMENTS)


def refused(rank: int, wrong_rank: int, operator: str, policy: dict[str, Any]) -> str:
    with device(operator if rank == wrong_rank else None) as standin:
        with pytest.raises((tagc.KernelError, RuntimeError)) as raised:
            wrapped(policy)
        assert standin.compiled
    # Nothing stays behind.
    model = wrapped(POLICY, ops="reference")
    gradients(model, rank)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_wrong_kernel_on_one_rank_is_refused_on_all():
    mine, other = run_ranks(refused, 2, 0, "steer", SELECTING)
    assert mine.startswith("KernelError: tagc: tagc.triton_kernels.ops does not give")
    for part in ("steer(target float32", "elements of 'state' differ", "ops='reference'"):
        assert part in mine
    assert other.startswith("RuntimeError: tagc.wrap failed on rank 0")
    assert "KernelError" in other


def test_a_sketch_on_its_own_is_checked_once():
    x = torch.zeros(1000, dtype=torch.int32)
    x[7] = 3
    with device() as standin:
        codec = tagc.CountSketch(1000, keys=50)
        assert codec.decode(codec.encode(x)).values[7] == 3
        once = len(standin.ran)
        codec.encode(x)
        assert len(standin.ran) == once + 1


def test_kernels_for_gpus_are_compiled_and_checked(monkeypatch):
    """On an emulated device; a wrong one is refused."""
    pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
    from device.ptx.launch import emulated

    rule = POLICY["gradients"][0] | {"when": {"name": "a.*"}}
    eight = {"when": rule["when"], "codec": {"kind": "quantized", "bits": 8}}
    both = {"schema": 1, "gradients": [rule], "parameters": [eight]}
    plan = tagc.explain({"a.weight": (32, 64), "b.bias": (32,)}, both, world_size=2)
    ops, cpu = get_ops("cuda", "triton"), torch.device("cpu")
    monkeypatch.setattr("tagc.selfcheck.checking._PASSED", set())
    with emulated() as launches:
        text = make_ready(plan, ops, cpu, shown=False)
    assert text is not None
    assert text.startswith("kernels: 4 kinds of calls give the reference's bits")
    # Of gradients and of parameters, wherever tensors lie.
    each = 2 * len(PLACEMENTS)
    assert launches == {"quantize_kernel": each, "dequantize_kernel": each}
    monkeypatch.setattr("tagc.selfcheck.checking._PASSED", set())
    with (
        emulated(change=lambda ptx: ptx.replace("min.f32", "max.f32", 1)),
        pytest.raises(tagc.KernelError, match=r"quantize_and_put\(.*: aligned: \d+ of \d+ elem"),
    ):
        make_ready(plan, ops, cpu, shown=False)
