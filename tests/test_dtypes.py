"""No tensor of the library has a dtype by default: users may change that one for everybody."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Functions of torch whose result has the default dtype, unless they are told another.
FACTORIES = {
    *("zeros", "ones", "empty", "full", "tensor", "rand", "randn", "linspace", "logspace"),
    *("eye", "as_tensor", "scalar_tensor"),
}
FILES = sorted(
    file for folder in ("tagc", "triton_kernels") for file in (ROOT / folder).rglob("*.py")
)


def without_dtype(source: str) -> list[int]:
    """Lines of calls of torch's factories that name no dtype."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg == "dtype" for keyword in node.keywords)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_factory_call_names_a_dtype(file: Path) -> None:
    assert not without_dtype(file.read_text())


def test_a_call_without_one_is_seen() -> None:
    assert without_dtype("x = torch.zeros(3)\ny = torch.zeros(3, dtype=torch.int32)") == [1]
