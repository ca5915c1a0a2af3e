"""The check before training runs the variants of kernels that training launches: those with the
same constants.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import pytest
import torch

from support.calls import every_call
from support.launches import Variant, noting_launches
from support.marks import slow
from support.trials import PLACEMENTS, case_of
from tagc.collect import rehearse
from tagc.costs.explain import Setting
from tagc.costs.shapes import synthetic
from tagc.ops import compiles_ahead, get_ops
from tagc.policy import Policy, data_parallel_policies
from tagc.selfcheck import Call, Recorder

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


def calls_of(policy: str, ranks: int, numel: int) -> Recorder:
    """Those of a rehearsal of a large model, which are made with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        setting = Setting(shapes=synthetic(numel), world_size=ranks, dtype=BF16)
        plan = setting.plan(Policy.load(policy))
    recorder = Recorder(OPS)
    assert compiles_ahead(OPS)
    with OPS.compiling_only():
        rehearse(plan, recorder.ops, stamped=True)
    return recorder


# The numbers of ranks decide whether sketches are direct, how many columns a program has, and how
# many messages it reads at a time.
@pytest.mark.parametrize(
    ("policy", "ranks", "numel"),
    [
        ("attn-only", 8, 10**9),
        *(
            slow(policy, ranks, 7 * 10**9)
            for policy in sorted(set(data_parallel_policies()) - {"auto", "dense"})
            for ranks in (2, 64)
        ),
    ],
)
def test_what_a_large_model_launches_is_checked(policy, ranks, numel):
    with noting_launches() as launched:
        recorder = calls_of(policy, ranks, numel)
    assert launched
    assert launched <= of_the_check(recorder.calls)


def test_the_check_at_length_has_large_tables_and_many_columns():
    constants = {(name, *one) for name, chosen, _ in of_the_check(every_call()) for one in chosen}
    for columns in (32, 64):
        assert ("matrix_columns_kernel", "COLUMNS", columns) in constants
    for packed in (True, False):
        assert ("peel_kernel", "PACKED", packed) in constants
