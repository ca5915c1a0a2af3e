"""The kernels' source: what an older Triton, of which users have one, takes for something else; and
operators launch on the device of their tensors, not on the one that happens to be current."""

from __future__ import annotations

import ast
import inspect
from unittest import mock

import pytest
import torch

from support.launches import kernels
from support.paths import ROOT
from tagc.selfcheck.calls import OPERATORS

# What a minus stands before, but for constants: integers, and numbers that are not zero or are
# added to what is not minus zero.
INTEGERS = {"turn", "upper << 22", "contribution(key, h, PACKED)"}
NOT_ZERO = {"levels", "symbol"}


def compiled(node: ast.AST) -> bool:
    """Whether Triton compiles this function."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(ast.unparse(decorator).partition("(")[0] == "jit" for decorator in decorators)


def test_no_float_that_may_be_zero_has_a_minus():
    """Before 3.8 that is a difference from 0, so -0 becomes 0: ``scalar.negated`` is for these."""
    found = 0
    for path in sorted((ROOT / "triton_kernels").glob("*.py")):
        functions = filter(compiled, ast.walk(ast.parse(path.read_text())))
        for node in (node for function in functions for node in ast.walk(function)):
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
                found += 1
                operand = ast.unparse(node.operand)
                constant = isinstance(node.operand, ast.Constant) or operand.isupper()
                constant |= operand.startswith("float(") and "tl." not in operand
                where = f"{path.name}:{node.lineno}: -{operand}"
                assert constant or operand in INTEGERS | NOT_ZERO, where
                assert operand not in ("0.0", "0"), where
    assert found > 5


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_launches_on_the_device_of_a_tensor(name, by_name):
    pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
    operator = getattr(kernels("ops"), name)
    parameters = inspect.signature(operator).parameters.values()
    # Every argument is its own name.
    placed = [] if by_name else [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    named = {p.name: p.name for p in parameters if p.name not in placed}
    with (
        mock.patch.object(torch.cuda, "device_of", side_effect=RuntimeError("there")) as device_of,
        pytest.raises(RuntimeError, match="there"),
    ):
        operator(*placed, **named)
    (given,) = device_of.call_args.args
    annotation = inspect.signature(operator, eval_str=True).parameters[given].annotation
    assert annotation is torch.Tensor
