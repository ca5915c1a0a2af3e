"""The check before training runs the variants of kernels that training launches.

They are told apart by their constants here, and in a slow test by the code that they compile to.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import pytest
import torch

from support.compiled import compiling
from support.launches import Variant, noting_launches
from support.marks import slow
from support.trials import PLACEMENTS, case_of
from tagc.collect import rehearse
from tagc.costs.explain import plan_shapes
from tagc.costs.shapes import synthetic
from tagc.ops import compiles_ahead, get_ops
from tagc.policy import Policy, data_parallel_policies
from tagc.selfcheck import Call, Recorder, every_call

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
OPS = get_ops("cuda", "triton")
BF16, CPU = torch.bfloat16, torch.device("cpu")


def run_the_check(calls: Iterable[Call]) -> None:
    assert compiles_ahead(OPS)
    with OPS.compiling_only():
        for call in calls:
            case = case_of(call)
            for place in PLACEMENTS.values():
                case.run(OPS, lambda x, place=place: place(x, CPU))


def of_the_check(calls: Iterable[Call]) -> set[Variant]:
    with noting_launches() as found:
        run_the_check(calls)
    return found


def calls_of(policy: str, ranks: int) -> Recorder:
    """Those of a rehearsal of a large model, which are made with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plan = plan_shapes(
            synthetic(7_000_000_000), Policy.load(policy), world_size=ranks, replicas=1,
            dtype=BF16, parameter_dtype=BF16, choose=None,
        )  # fmt: skip
    recorder = Recorder(OPS)
    assert compiles_ahead(OPS)
    with OPS.compiling_only():
        rehearse(plan, recorder.ops, stamped=True)
    return recorder


# The numbers of ranks decide whether sketches are direct, how many columns a program has, and how
# many messages it reads at a time.
@pytest.mark.parametrize("ranks", [slow(2), 8, slow(64)])
@pytest.mark.parametrize(
    "policy",
    [
        policy if policy == "attn-only" else slow(policy)
        for policy in sorted(set(data_parallel_policies()) - {"auto", "dense"})
    ],
)
def test_what_a_large_model_launches_is_checked(policy, ranks):
    with noting_launches() as launched:
        recorder = calls_of(policy, ranks)
    assert launched
    assert launched <= of_the_check(recorder.calls)


def test_the_check_at_length_has_large_tables_and_many_columns():
    constants = {(name, *one) for name, chosen, _ in of_the_check(every_call()) for one in chosen}
    for columns in (32, 64):
        assert ("matrix_columns_kernel", "COLUMNS", columns) in constants
    for packed in (True, False):
        assert ("peel_kernel", "PACKED", packed) in constants


@pytest.mark.parametrize(
    ("policy", "ranks"),
    [
        slow("attn-only", 2),
        slow("thrifty", 8),
        slow("hybrid", 8),
    ],
)
def test_the_code_that_a_large_model_runs_is_checked(policy, ranks):
    with compiling(90) as launched:
        recorder = calls_of(policy, ranks)
    with compiling(90) as checked:
        run_the_check(recorder.calls)
    assert launched
    assert {(k.name, k.ptx) for k in launched} <= {(k.name, k.ptx) for k in checked}
