"""The CPU's operators give the bits of the reference, for generated inputs of many sizes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from support.marks import slow
from support.trials import SHARDS, SIZES, Trial, shards, trials
from tagc.ops import ABOVE, KEPT, NONZERO, SATURATED, get_ops
from tagc.selfcheck.calls import OPERATORS
from tagc.selfcheck.cases import case_of

CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
HERE = torch.device("cpu")
TRIALS = trials()
# A part of them, for implementations that are slow to run.
FEW = trials(SIZES)


@pytest.mark.parametrize(
    "trial", [t if t.compiled else slow(t) for t in TRIALS], ids=lambda trial: trial.name
)
def test_the_cpu_has_the_bits_of_the_reference(trial: Trial):
    trial.check(CPU, HERE)


@pytest.mark.parametrize("numel", SHARDS)
def test_shards_of_several_tiles(numel: int):
    shards(numel).check(CPU, HERE, "aligned", "not aligned")


def results(operator: str) -> list[tuple[dict[str, Tensor], Tensor]]:
    """What the reference returns for each case of an operator, and the case's first tensor."""
    found = []
    for trial in FEW:
        for call, inputs in trial.calls:
            if call.operator == operator:
                case = case_of(call, inputs)
                given = next(iter(case.tensors.values()))
                assert given is not None
                found.append((case.run(REFERENCE, Tensor.clone), given))
    return found


def test_trials_have_all_that_kernels_stumble_over():
    """Every operator; groups that do not fit, ties, tables that are too small, and so on."""
    calls = [call for trial in FEW for call, _ in trial.calls]
    assert {call.operator for call in calls} == {*OPERATORS}
    seen: Counter[str] = Counter()
    for operator in ("select", "encode"):
        for found, x in results(operator):
            above, nonzero, kept, clipped = (
                found["counts"][:, i] for i in (ABOVE, NONZERO, KEPT, SATURATED)
            )
            seen[f"{operator}: trimmed"] += bool((above > kept).any() and (kept > 0).any())
            seen[f"{operator}: nothing kept"] += bool((nonzero > kept).any() and not kept.any())
            seen[f"{operator}: all kept"] += bool(kept.any() and (kept == nonzero).all())
            seen[f"{operator}: clipped"] += bool(clipped.any())
            seen[f"{operator}: not finite"] += not bool(x.isfinite().all())
    for operator in ("quantize", "quantize_matrix"):
        for _, x in results(operator):
            seen[f"{operator}: not finite"] += not bool(x.isfinite().all())
            seen[f"{operator}: subnormal"] += bool(((x != 0) & (x.abs().float() < 1e-38)).any())
    for found, _ in results("decode"):
        keys, left = found["stats"].tolist()
        seen["decode: unresolved"] += 0 < left < keys
        seen["decode: resolved"] += keys > 0 and left == 0
    expected = [
        *(f"{name}: {what}" for name in ("select", "encode") for what in (
            "trimmed", "nothing kept", "all kept", "not finite")),
        *(f"{name}: {what}" for name in ("quantize", "quantize_matrix") for what in (
            "not finite", "subnormal")),
        "encode: clipped", "decode: unresolved", "decode: resolved",
    ]  # fmt: skip
    assert all(seen[what] >= 3 for what in expected), seen
