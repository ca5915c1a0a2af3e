"""The check before training runs the variants of kernels that training launches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import pytest
import torch

import tagc
from support.launches import Variant, noting_launches
from tagc.comm import rehearse
from tagc.costs.explain import plan_shapes
from tagc.costs.shapes import synthetic
from tagc.ops import compiles_ahead, get_ops
from tagc.policy import Policy
from tagc.selfcheck import Call, Recorder, every_call
from tagc.selfcheck.cases import case_of

OPS = get_ops("cuda", "triton")
BF16 = torch.bfloat16


def of_the_check(calls: Iterable[Call]) -> set[Variant]:
    assert compiles_ahead(OPS)
    with noting_launches() as found, OPS.compiling_only():
        for call in calls:
            case_of(call).run(OPS, torch.Tensor.clone)
    return found


# The numbers of ranks decide whether sketches are direct, how many columns a program has, and how
# many messages it reads at a time.
@pytest.mark.parametrize("ranks", [2, 8, 12, 64])
def test_what_a_large_model_launches_is_checked(ranks):
    for policy in set(tagc.policies()) - {"auto", "dense"}:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            plan = plan_shapes(
                synthetic(7_000_000_000), Policy.load(policy), world_size=ranks, replicas=1,
                dtype=BF16, parameter_dtype=BF16, choose=None,
            )  # fmt: skip
        recorder = Recorder(OPS)
        assert compiles_ahead(OPS)
        with noting_launches() as launched, OPS.compiling_only():
            rehearse(plan, recorder.ops)
        assert launched
        assert launched <= of_the_check(recorder.calls), policy


def test_the_check_at_length_has_large_tables_and_many_columns():
    constants = {(name, *one) for name, chosen, _ in of_the_check(every_call()) for one in chosen}
    for columns in (32, 64):
        assert ("matrix_columns_kernel", "COLUMNS", columns) in constants
    for packed in (True, False):
        assert ("peel_kernel", "PACKED", packed) in constants
