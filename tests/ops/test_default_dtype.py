"""Torch's default dtype, which models in bfloat16 are often made with, changes no operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from support.exact import equal
from support.trials import OPERATORS, SIZES, Trial, trials
from tagc.ops import cpu, get_ops
from tagc.ops.blocks import BlockLayout
from tagc.ops.cpu import blocks as cpu_blocks
from tagc.ops.cpu import lag as cpu_lag
from tagc.ops.cpu import matrix as cpu_matrix
from tagc.ops.cpu import sketch as cpu_sketch
from tagc.ops.cpu import thresholds as cpu_thresholds
from tagc.ops.matrix import MatrixLayout
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
# One of each format; all is in float32, so that a dtype by default is another one.
TRIALS = [
    trial
    for trial in trials(SIZES)
    if trial.compiled and trial.name.replace(" float32", "", 2).count("float") == 0
]


@pytest.fixture
def set_default() -> Iterator[Callable[[torch.dtype], None]]:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [BF16, F64], ids=["bfloat16", "float64"])
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_gives_the_same_bits(name, trial: Trial, dtype, set_default):
    ops = get_ops("cpu", name)
    cases = list(trial.cases())
    wanted = [case.run(ops, Tensor.clone) for case in cases]
    set_default(dtype)
    for case, before in zip(cases, wanted, strict=True):
        equal(case.run(ops, Tensor.clone), before)


def test_all_operators_are_run():
    assert {case.call.operator for trial in TRIALS for case in trial.cases()} == {*OPERATORS}


@pytest.mark.parametrize("dtype", [BF16, F64], ids=["bfloat16", "float64"])
def test_prepares(dtype, set_default):
    for module in (cpu_sketch, cpu_blocks, cpu_matrix, cpu_lag, cpu_thresholds):
        module._compile.cache_clear()  # what is prepared already is not prepared again
    set_default(dtype)
    cpu.prepare(plan_layout(100, SYMBOLS["int8x4"], 100), F32, F32)
    cpu.prepare_blocks(BlockLayout(numel=100, bits=8), F32, F32, 0.0)
    cpu.prepare_matrix(MatrixLayout(rows=2, columns=8), F32, F32, 0.0)
    cpu.prepare_lag()
    cpu.prepare_thresholds()
