"""Run cases on ranks, and say what became of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

import tagc
from support.distributed import run_ranks
from support.states import shared_folder
from tagc.plan import UnitPlan

from .apis import APIS, Api
from .cases import Case
from .option import DTYPES, POLICIES, Option, nothing
from .sums import bound, check_steps, owes, recorded, reduction, spread, tiny

STEPS = 2


@dataclass(frozen=True)
class Outcome:
    """passed, refused with a message, or failed with a traceback."""

    kind: str
    said: str = ""


def run(selected: Sequence[Case], default_dtype: str = "float32") -> dict[Case, Outcome]:
    """What became of the cases, by case.

    Args:
        default_dtype: torch's, on all ranks.
    """
    outcomes: dict[Case, Outcome] = {}
    by_ranks = sorted(selected, key=lambda case: case.ranks)
    for ranks, some in groupby(by_ranks, key=lambda case: case.ranks):
        here = list(some)
        answers = run_ranks(run_on_a_rank, ranks, here, default_dtype, timeout=30 + 3 * len(here))
        for case, of_ranks in zip(here, zip(*answers, strict=True), strict=True):
            worst = [o for o in of_ranks if o.kind == "failed"] or list(of_ranks)
            outcomes[case] = worst[0]
            if len({o.kind for o in of_ranks}) > 1:
                outcomes[case] = Outcome("failed", f"ranks differ: {of_ranks}")
    return outcomes


def run_on_a_rank(rank: int, selected: Sequence[Case], default_dtype: str) -> list[Outcome]:
    outcomes = {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, default_dtype))
    try:
        for _, some in groupby(sorted(selected, key=lambda c: c.group), key=lambda c: c.group):
            natives: list[History] = []
            for case in some:
                outcomes[case] = outcome(rank, case, natives)
    finally:
        torch.set_default_dtype(before)
    return [outcomes[case] for case in selected]


def outcome(rank: int, case: Case, natives: list[History]) -> Outcome:
    try:
        check(rank, case, natives)
    except Exception as error:
        if case.refused and case.refused in str(error):
            return Outcome("refused", str(error))
        return Outcome("failed", traceback.format_exc())
    return Outcome("failed", "was not refused") if case.refused else Outcome("passed")


def check(rank: int, case: Case, natives: list[History]) -> None:
    api, dtype = APIS[case.api], DTYPES[case.dtype]
    option, policy = api.options[case.option], POLICIES[case.policy]
    with recorded() as amounts:
        wrapped = api.wrapped(option, dtype, policy)
        units = tagc.compressor(wrapped).plan().units

        def resume() -> None:
            if option.resumes:
                go_back(rank, option, wrapped, amounts)

        mine = history(rank, api, option, wrapped, units, resume)
    if not natives:
        natives.append(history(rank, api, option, api.native(option, dtype), units))
    theirs = natives[0]
    if policy is None and api.same_bits:
        for one, other in zip(mine.all, theirs.all, strict=True):
            assert torch.equal(one, other), f"{(one - other).abs().max():.3g} off"
        assert any(bool(grad.any()) for grad in mine.all)
        return
    how = reduction(api, option, dtype)
    owed, amount = owes(wrapped, how), spread(wrapped, how, amounts)
    reductions = tagc.compressor(wrapped).metrics().steps
    assert tagc.compressor(wrapped).metrics().unresolved == 0
    assert case.policy in ("dense", "int32x1") or any(bool(o.any()) for o in owed), (
        "nothing was held back"
    )
    for got, native, left, size in zip(mine.sums, theirs.sums, owed, amount, strict=True):
        off = (got + left - native).abs()
        allowed = bound(case.ranks, reductions, dtype) * api.replicas * size + tiny(dtype)
        assert bool((off <= allowed).all()), f"{off.max():.3g} lost of {size.max():.3g}"
        assert native.any() or not size.any()
    # Other copies have other steps.
    if case.policy == "int32x1" and not tagc.compressor(wrapped).replica_reducers:
        check_steps(wrapped, how, owed)


@dataclass(frozen=True)
class History:
    """Gradient shards of the units.

    Attributes:
        sums: over the steps, as backward leaves them.
        all: of every step, as the optimizer gets them.
    """

    sums: list[Tensor]
    all: list[Tensor]


def go_back(rank: int, option: Option, model: Any, amounts: dict[int, Tensor]) -> None:
    """Save tagc's state, take a step, and load: that step has not been."""
    before = dict(amounts)
    compressor = tagc.compressor(model)
    with shared_folder() as folder:
        compressor.save(folder)
        option.backward(model, rank, STEPS)
        model.zero_grad()
        compressor.load(folder)
    amounts.clear()
    amounts.update(before)


def history(
    rank: int,
    api: Api,
    option: Option,
    model: Any,
    units: Sequence[UnitPlan],
    resume: Callable[[], None] = lambda: None,
) -> History:
    """All steps, with the same weights.

    Args:
        resume: called between two steps.
    """
    sums: list[Tensor] = []
    every: list[Tensor] = []
    for step in range(STEPS):
        option.backward(model, rank, step)
        grads = api.gradients(model, units)
        sums = [s + g for s, g in zip(sums, grads, strict=True)] if sums else grads
        option.after(model)
        every += grads if option.after is nothing else api.gradients(model, units)
        # Changes nothing, but makes messages about changes due, for policies that send these.
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        model.zero_grad()
        if step + 1 < STEPS:
            resume()
    return History(sums, every)
