"""No tensor has a dtype or a device by default: users may change both for everybody."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Functions of torch whose result has the default dtype, or is on the default device, unless they
# are told another.
DTYPED = {
    *("zeros", "ones", "empty", "full", "tensor", "rand", "randn", "linspace", "logspace"),
    *("eye", "as_tensor", "asarray", "scalar_tensor", "empty_strided", "empty_permuted", "normal"),
}
PLACED = DTYPED | {"arange", "range", "randint", "randperm", "tril_indices", "triu_indices"}
FILES = sorted(
    file for folder in ("tagc", "triton_kernels") for file in (ROOT / folder).rglob("*.py")
)


def without(keyword: str, functions: set[str], source: str) -> list[int]:
    """Lines of calls of these functions of torch that do not give this keyword."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in functions
        and not any(given.arg == keyword for given in node.keywords)
    ]


def test_every_factory_call_names_a_dtype_and_a_device() -> None:
    found = {
        str(file.relative_to(ROOT)): (
            without("dtype", DTYPED, file.read_text()),
            without("device", PLACED | {"Generator"}, file.read_text()),
        )
        for file in FILES
    }
    assert not {file: lines for file, lines in found.items() if any(lines)}
