"""The kernels' source: what an older Triton, of which users have one, takes for something else."""

from __future__ import annotations

import ast

from support.paths import ROOT

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
