"""The check of an implementation on its device: what is right passes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from support.calls import every_call
from support.trials import OPERATORS, case_of
from tagc.ops import Ops, get_ops
from tagc.selfcheck import KernelError, check

REFERENCE = get_ops("cpu", "reference")
CPU = torch.device("cpu")
CALLS = list(every_call())
ONE_OF_EACH = {call.operator: call for call in reversed(CALLS)}


def standin(name: str, **operators: Callable[..., Any]) -> Ops:
    """The reference under another name, with these operators instead of its own."""
    own = {operator: getattr(REFERENCE, operator) for operator in OPERATORS}
    return cast(Ops, SimpleNamespace(**{"__name__": name, **own, **operators}))


def spoiling(operator: str, spoil: Callable[[dict[str, Any], Any], None]) -> Callable[..., Any]:
    """An operator of the reference after which ``spoil`` gets its arguments and its result."""

    def wrong(**arguments: Any) -> Any:
        returned = getattr(REFERENCE, operator)(**arguments)
        spoil(arguments, returned)
        return returned

    return wrong


def change(x: Tensor) -> None:
    """Another last element, that is as finite as it was."""
    flat = x[..., -1:]
    flat.copy_(flat == 0 if x.dtype == torch.bool else torch.where(flat == 1, 2, 1).to(x.dtype))


def test_the_reference_passes():
    assert set(ONE_OF_EACH) == set(OPERATORS)
    note = check(standin("passes"), CPU, ONE_OF_EACH.values())
    assert f"{len(OPERATORS)} kinds of calls give the reference's bits" in note
    assert f"torch {torch.__version__}" in note


# Also those that an operator only reads. Decoding uses up its cells.
ARGUMENTS = {
    (call.operator, name): call
    for call in reversed(CALLS)
    for name, dtype in call.dtypes
    if dtype is not None and (call.operator, name) != ("decode", "cells")
}


@pytest.mark.parametrize(("operator", "output"), sorted(ARGUMENTS))
def test_one_wrong_element_is_noticed(operator, output):
    def spoil(arguments: dict[str, Any], returned: Any) -> None:
        change(arguments[output])

    wrong = standin("wrong", **{operator: spoiling(operator, spoil)})
    with pytest.raises(KernelError, match=rf"wrong does not give .* elements of '{output}' differ"):
        check(wrong, CPU, [ARGUMENTS[operator, output]])


def test_a_wrong_result_of_peeling_is_noticed():
    wrong = standin("wrong", peel=spoiling("peel", lambda arguments, found: change(found[1])))
    with pytest.raises(KernelError, match="elements of 'result 1' differ"):
        check(wrong, CPU, [ONE_OF_EACH["peel"]])


def test_a_fault_of_rows_that_are_not_aligned_is_noticed():
    def spoil(arguments: dict[str, Any], returned: Any) -> None:
        if arguments["message"].storage_offset():
            change(arguments["message"])

    wrong = standin("wrong", quantize=spoiling("quantize", spoil))
    with pytest.raises(KernelError, match="not aligned: 2 of"):
        check(wrong, CPU, [ONE_OF_EACH["quantize"]])


def test_an_error_names_operator_shapes_versions_and_the_way_out():
    def fails(**arguments: Any) -> None:
        raise RuntimeError("misaligned address")

    with pytest.raises(KernelError) as raised:
        check(standin("wrong", dequantize=fails), CPU, [ONE_OF_EACH["dequantize"]])
    message = str(raised.value)
    for part in (
        "dequantize(out float", "layout=BlockLayout(", "aligned: RuntimeError: misaligned address",
        "message int32 [1, 8, ", f"torch {torch.__version__}", "ops='reference'", "TAGC_OPS",
        "tagc doctor",
    ):  # fmt: skip
        assert part in message


@pytest.mark.parametrize("operator", ["quantize", "quantize_matrix", "encode"])
def test_inputs_have_what_kernels_stumble_over(operator):
    for case in (case_of(call) for call in CALLS if call.operator == operator):
        x = case.tensors["grad"]
        assert x is not None
        assert not x.isfinite().all()
        assert (x == 0).any()
        results = case.run(REFERENCE, Tensor.clone)
        assert any((result != case.tensors[name]).any() for name, result in results.items())
