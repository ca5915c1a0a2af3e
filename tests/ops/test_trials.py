"""Operators on the table of cases: the reference by the contract, the CPU's as the reference."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from support import contract, oracle
from support.edges import check_lag_in_place, edges
from support.marks import slow
from support.trials import OPERATORS, SHARDS, SIZES, Trial, shards, trials
from tagc.ops import ABOVE, KEPT, NONZERO, SATURATED, get_ops

CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
HERE = torch.device("cpu")
TRIALS, EDGES = trials(), edges()
# A part of them, for implementations that are slow to run.
FEW = trials(SIZES)


@pytest.mark.parametrize("trial", FEW + EDGES, ids=lambda trial: trial.name)
def test_the_reference_is_the_contract(trial: Trial):
    for case in trial.cases():
        operator, before = case.call.operator, case.tensors
        want = contract.results(operator, before, dict(case.call.options))
        got = case.run(REFERENCE, Tensor.clone)
        contract.check(got, want, estimated=operator == "decode")
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
