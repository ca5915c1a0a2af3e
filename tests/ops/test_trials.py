"""Operators on the table of cases: the CPU's have the bits of the reference, whatever torch's
default dtype; and divisions as GPUs make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.edges import check_lag_in_place, edges
from support.exact import equal
from support.marks import slow
from support.trials import OPERATORS, SHARDS, SIZES, Trial, one_of_each, shards, trials
from tagc.ops import get_ops

CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
HERE = torch.device("cpu")
# Each format gets a few of the sizes; together they have all.
FEW, EDGES = trials(SIZES), edges()


@pytest.mark.parametrize(
    "trial", [t for t in FEW + EDGES if t.compiled], ids=lambda trial: trial.name
)
def test_the_cpu_has_the_bits_of_the_reference(trial: Trial):
    trial.check(CPU, HERE)


@pytest.mark.slow
@pytest.mark.parametrize("trial", trials(), ids=lambda trial: trial.name)
def test_all_sizes(trial: Trial):
    trial.check(CPU, HERE)


@pytest.mark.parametrize("numel", [n if n < 2**19 else slow(n) for n in SHARDS])
def test_shards_of_several_tiles(numel: int):
    shards(numel).check(CPU, HERE, "aligned", "not aligned")


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_a_lag_is_undone_in_place(ops):
    check_lag_in_place(ops, "cpu")


def test_all_operators_are_run():
    calls = [maker.args[0] for trial in FEW for maker in trial.makers]  # pyright: ignore
    assert {call.operator for call in calls} == {*OPERATORS}


# CUDA multiplies with the reciprocal of a Python number, which rounds twice


class Divisions(TorchDispatchMode):
    """Counts divisions of floats by tensors, and refuses those by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            assert isinstance(args[1], Tensor), f"{func} by {args[1]!r}"
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_no_division_is_by_a_number():
    cases = one_of_each()
    with Divisions() as counted:
        for case in cases:
            case.run(REFERENCE, Tensor.clone)
    assert counted.count > 0
    with pytest.raises(AssertionError, match=r"aten\.div"), Divisions():
        torch.ones(4).div_(3)


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_the_default_dtype_changes_no_operator(ops):
    cases, before = one_of_each(), torch.get_default_dtype()
    wanted = [case.run(REFERENCE, Tensor.clone) for case in cases]
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = [case.run(ops, Tensor.clone) for case in cases]
    finally:
        torch.set_default_dtype(before)
    for mine, other in zip(got, wanted, strict=True):
        equal(mine, other)
