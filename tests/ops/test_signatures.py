"""Every implementation has the operators of the contract, with the contract's signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from support.kernel_cases import kernels
from tagc.ops import Ops, cpu, reference

# By name: the methods of `Ops` and of the protocols that it is made of.
CONTRACT: dict[str, Callable[..., Any]] = {
    name: method
    for protocol in reversed(inspect.getmro(Ops))
    if protocol.__module__.startswith("tagc.")
    for name, method in vars(protocol).items()
    if inspect.isfunction(method) and not name.startswith("_")
}


@pytest.fixture(params=["reference", "cpu", "triton"])
def ops(request) -> ModuleType:
    if request.param == "triton":
        pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
        return kernels("ops")
    return {"reference": reference, "cpu": cpu}[request.param]


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """With annotations as the types that they stand for."""
    return inspect.signature(function, eval_str=True)


def test_has_the_operators_and_nothing_else(ops):
    # Those for devices can be compiled ahead, see `DeviceOps`.
    ahead = ["compiling_only", "recorded"] if ops not in (cpu, reference) else []
    assert ops.__all__ == sorted([*CONTRACT, *ahead])


@pytest.mark.parametrize("name", CONTRACT)
def test_has_the_signature_of_the_contract(ops, name):
    wanted = signature_of(CONTRACT[name])
    _, *parameters = wanted.parameters.values()
    got = signature_of(getattr(ops, name))
    assert got == wanted.replace(parameters=parameters)
