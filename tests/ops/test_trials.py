"""Operators on the table of cases: the CPU's have the bits of the reference, whatever torch's
default dtype; what both share, those of its contract; and divisions as GPUs make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support import contract, oracle
from support.edges import check_lag_in_place, edges
from support.exact import equal
from support.marks import slow
from support.trials import OPERATORS, SHARDS, SIZES, Trial, one_of_each, shards, trials
from tagc.ops import ABOVE, KEPT, NONZERO, SATURATED, cpu, get_ops
from tagc.ops.blocks import BlockLayout
from tagc.ops.cpu import blocks as cpu_blocks
from tagc.ops.cpu import exact as cpu_exact
from tagc.ops.cpu import exponents as cpu_exponents
from tagc.ops.cpu import lag as cpu_lag
from tagc.ops.cpu import matrix as cpu_matrix
from tagc.ops.cpu import sketch as cpu_sketch
from tagc.ops.cpu import thresholds as cpu_thresholds
from tagc.ops.exact import ExactLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS

CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
HERE = torch.device("cpu")
TRIALS, EDGES = trials(), edges()
# A part of them, for implementations that are slow to run.
FEW = trials(SIZES)


SHARED = [t for t in FEW if t.name.startswith(("dense", "merged", "fingerprint"))]


@pytest.mark.parametrize("trial", SHARED, ids=lambda trial: trial.name)
def test_what_implementations_share_is_the_contract(trial: Trial):
    for case in trial.cases():
        operator, before = case.call.operator, case.tensors
        want = contract.results(operator, before, dict(case.call.options))
        got = case.run(REFERENCE, Tensor.clone)
        contract.check(got, want)
        for name, x in before.items():
            if x is not None and name not in want and name not in case.scratch:
                assert oracle.same_bits(got[name], x), f"{operator} changes {name}"


@pytest.mark.parametrize(
    "trial",
    [t if t.compiled else slow(t) for t in TRIALS + EDGES],
    ids=lambda trial: trial.name,
)
def test_the_cpu_has_the_bits_of_the_reference(trial: Trial):
    trial.check(CPU, HERE)


@pytest.mark.parametrize("numel", SHARDS)
def test_shards_of_several_tiles(numel: int):
    shards(numel).check(CPU, HERE, "aligned", "not aligned")


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_a_lag_is_undone_in_place(ops):
    check_lag_in_place(ops, "cpu")


def test_trials_have_all_that_kernels_stumble_over():
    """Every operator; groups that do not fit, ties, tables that are too small, and so on."""
    seen: Counter[str] = Counter()
    for case in (case for trial in FEW for case in trial.cases()):
        operator, x = case.call.operator, next(x for x in case.tensors.values() if x is not None)
        got = case.run(REFERENCE, Tensor.clone)
        seen[operator] += 1
        if operator in ("select", "encode"):
            above, nonzero, kept, clipped = (
                got["counts"][:, i] for i in (ABOVE, NONZERO, KEPT, SATURATED)
            )
            seen[f"{operator}: trimmed"] += bool((above > kept).any() and (kept > 0).any())
            seen[f"{operator}: nothing kept"] += bool((nonzero > kept).any() and not kept.any())
            seen[f"{operator}: all kept"] += bool(kept.any() and (kept == nonzero).all())
            seen["encode: clipped"] += bool(clipped.any())
        if operator in ("quantize", "quantize_matrix"):
            seen[f"{operator}: subnormal"] += bool(((x != 0) & (x.abs().float() < 1e-38)).any())
        if operator in ("select", "encode", "quantize", "quantize_matrix"):
            seen[f"{operator}: not finite"] += not bool(x.isfinite().all())
        if operator == "decode":
            keys, left = got["stats"].tolist()
            seen["decode: unresolved"] += 0 < left < keys
            seen["decode: resolved"] += keys > 0 and left == 0
    assert {*OPERATORS} <= {*seen}
    assert len(seen) == len(OPERATORS) + 6 + 1 + 2 + 4 + 2
    assert all(count >= 3 for count in seen.values()), seen


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


@pytest.mark.parametrize("case", one_of_each(), ids=lambda case: case.call.operator)
def test_no_division_is_by_a_number(case):
    with Divisions() as counted:
        case.run(get_ops("cpu", "reference"), Tensor.clone)
    divides = {
        "dequantize",
        "dequantize_matrix",
        "decode",
        "quantize_matrix",
        "undo_lag",
        "steer",
        "sum_dense",
        "dequantize_and_sum",
    }
    assert (counted.count > 0) == (case.call.operator in divides)


@pytest.mark.parametrize("divide", [lambda x: x / 3, lambda x: x.div_(3), lambda x: x / 0.5])
def test_the_check_can_fail(divide):
    with pytest.raises(AssertionError, match=r"aten\.div"), Divisions():
        divide(torch.ones(4))


# Torch's default dtype changes no operator


F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
# One of each format; all is in float32, so that a dtype by default is another one. (Exact changes
# are never in float32.)
IN_FLOAT32 = [
    trial
    for trial in trials(SIZES)
    if trial.name.startswith(("exact", "exponents"))
    or (trial.compiled and trial.name.replace(" float32", "", 2).count("float") == 0)
]


@pytest.fixture
def set_default() -> Iterator[Callable[[torch.dtype], None]]:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [BF16, slow(F64)], ids=["bfloat16", "float64"])
@pytest.mark.parametrize("trial", IN_FLOAT32, ids=lambda trial: trial.name)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_gives_the_same_bits(name, trial: Trial, dtype, set_default):
    ops = get_ops("cpu", name)
    cases = list(trial.cases())
    wanted = [case.run(ops, Tensor.clone) for case in cases]
    set_default(dtype)
    for case, before in zip(cases, wanted, strict=True):
        equal(case.run(ops, Tensor.clone), before)


def test_all_operators_are_run():
    assert {case.call.operator for trial in IN_FLOAT32 for case in trial.cases()} == {*OPERATORS}


@pytest.mark.parametrize("dtype", [BF16, F64], ids=["bfloat16", "float64"])
def test_prepares(dtype, set_default):
    for module in (
        cpu_sketch,
        cpu_blocks,
        cpu_matrix,
        cpu_exact,
        cpu_exponents,
        cpu_lag,
        cpu_thresholds,
    ):
        module._compile.cache_clear()  # what is prepared already is not prepared again
    set_default(dtype)
    cpu.prepare(plan_layout(100, SYMBOLS["int8x4"], 100), F32, F32)
    cpu.prepare_blocks(BlockLayout(numel=100, bits=8), F32, F32, 0.0)
    cpu.prepare_matrix(MatrixLayout(rows=2, columns=8), F32, F32, 0.0)
    cpu.prepare_lag()
    cpu.prepare_thresholds()
    cpu.prepare_exact(ExactLayout(spans=(8,), dtype=BF16))
    cpu.prepare_exponents()
