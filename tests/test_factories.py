"""No tensor has a dtype or a device by default: users may change both for everybody."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.small_net import local_weights, sharded
from support.states import POLICIES, shared_folder, wrapped
from tagc.ops import reference
from tagc.selfcheck.cases import case_of
from tagc.selfcheck.everything import every_call

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


def test_a_call_without_one_is_seen() -> None:
    source = "x = torch.zeros(3)\ny = torch.zeros(3, dtype=torch.int32)"
    assert without("dtype", DTYPED, source) == [1]
    assert without("device", PLACED, source) == [1, 2]


class NothingByDefault(TorchDispatchMode):
    """No tensor may be on the device `meta`, which is the default inside."""

    def __init__(self) -> None:
        super().__init__()
        self._default = torch.device("meta")

    def __enter__(self) -> NothingByDefault:
        self._default.__enter__()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._default.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                assert leaf.device.type != "meta", f"{func} made a tensor on the default device"
        return out


def test_what_is_made_by_default_is_seen() -> None:
    with pytest.raises(AssertionError, match="default"), NothingByDefault():
        torch.ones(3, dtype=torch.int32)
    assert torch.ones(3).device.type == "cpu"


@on_ranks(2)
@pytest.mark.parametrize(
    ("policy", "ops"), [("sketch shared", "cpu"), ("matrix lead", "reference"), ("changes", "cpu")]
)
def test_a_run_with_another_default_device(
    rank: int, world_size: int, policy: str, ops: str
) -> None:
    """From `wrap` to a run that was resumed, to the same bits."""
    x = torch.randn(5, 7)

    def train(model: Any, folder: Path) -> dict[str, Any]:
        compressor = tagc.compressor(wrapped(POLICIES[policy], model, ops=ops))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(5):
            (model(x) * (step + 1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                compressor.save(folder)
            if step == 2:
                compressor.load(folder)
        return {"weights": local_weights(model), "state": compressor.state_dict()}

    with shared_folder() as folder:
        usual = train(sharded(), folder / "usual")
        model = sharded()
        with NothingByDefault():
            got = train(model, folder / "got")
    equal(got, usual)


def test_the_check_of_kernels_with_another_default_device() -> None:
    for call in every_call():
        usual = case_of(call)
        with NothingByDefault():
            case = case_of(call)
            got = case.run(reference, Tensor.clone)
        equal(got, usual.run(reference, Tensor.clone))
