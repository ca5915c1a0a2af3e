"""The combinations of API, option, dtype, ranks and policy, and what becomes of them on ranks."""

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
from .option import DTYPES, POLICIES, Option
from .sums import bound, owes, recorded, reduction, spread, tiny

STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    api: str
    dtype: str
    ranks: int
    option: str
    policy: str

    def __str__(self) -> str:
        return f"{self.api}-{self.option}-{self.dtype}-{self.ranks} ranks-{self.policy}"

    @property
    def group(self) -> tuple[str, int, str, str]:
        """Cases with the same native model."""
        return self.api, self.ranks, self.option, self.dtype

    @property
    def refused(self) -> str:
        """Words of the error that is expected, if one is."""
        option, dtype = APIS[self.api].options[self.option], DTYPES[self.dtype]
        if self.policy == "dense":
            return option.refused_dense
        if self.policy == "changes" and dtype.refused_changes:
            return dtype.refused_changes
        return dtype.refused or option.refused or APIS[self.api].refuses.get(self.policy, "")


def cases() -> list[Case]:
    """The matrix: every option in fp32, and every dtype, with every policy, on ranks in turn; the
    plain option on every number of ranks."""
    rows: dict[tuple[str, str, int, str], None] = {}
    for name, api in APIS.items():
        for i, (option, spec) in enumerate(api.options.items()):
            ranks = (4,) if api.replicas > 1 else spec.ranks
            rows[name, "fp32", ranks[i % len(ranks)], option] = None
        for i, dtype in enumerate(api.dtypes):
            rows[name, dtype, api.ranks[i % len(api.ranks)], "plain"] = None
        for ranks in api.ranks:
            rows[name, "fp32", ranks, "plain"] = None
    found = [
        Case(api=api, dtype=dtype, ranks=ranks, option=option, policy=policy)
        for api, dtype, ranks, option in rows
        for policy in POLICIES
        if policy not in APIS[api].refuses or (dtype, option) == ("fp32", "plain")
    ]
    return sorted(found, key=lambda case: (list(APIS).index(case.api), case.ranks))


# One or two of every API.
QUICK = (
    "FSDP2-reshard_after_forward=False-fp32-3 ranks-dense",
    "FSDP2-plain-model in fp64, reduced in fp32-2 ranks-dense",
    "FSDP2-blocks in one group-fp32-3 ranks-dense",
    "FSDP2-hybrid mesh, loss in chunks-fp32-4 ranks-changes",
    "FSDP2-hybrid mesh-fp32-4 ranks-dense",
    "FSDP2, hosts-one unit-fp32-4 ranks-matrix",
    "replicate-CPU offload-fp32-2 ranks-sketch",
    "replicate, hosts-plain-fp32-4 ranks-dense",
    "FSDP1-some parameters frozen-fp32-2 ranks-sketch",
    "DDP-no_sync, gradient_as_bucket_view-fp32-2 ranks-sketch",
    "DDP, hosts-static_graph, gradient_as_bucket_view-fp32-4 ranks-int32x1",
)


def quick_cases() -> list[Case]:
    """What `make test` runs."""
    return [case for case in cases() if str(case) in QUICK]


@dataclass(frozen=True)
class Outcome:
    """passed, refused with a message, or failed with a traceback."""

    kind: str
    said: str = ""


def run(selected: Sequence[Case]) -> dict[Case, Outcome]:
    """What became of the cases, by case."""
    outcomes: dict[Case, Outcome] = {}
    by_ranks = sorted(selected, key=lambda case: case.ranks)
    for ranks, some in groupby(by_ranks, key=lambda case: case.ranks):
        here = list(some)
        answers = run_ranks(run_on_a_rank, ranks, here, timeout=30 + 3 * len(here))
        for case, of_ranks in zip(here, zip(*answers, strict=True), strict=True):
            worst = [o for o in of_ranks if o.kind == "failed"] or list(of_ranks)
            outcomes[case] = worst[0]
            if len({o.kind for o in of_ranks}) > 1:
                outcomes[case] = Outcome("failed", f"ranks differ: {of_ranks}")
    return outcomes


def run_on_a_rank(rank: int, selected: Sequence[Case]) -> list[Outcome]:
    outcomes = {}
    for _, some in groupby(sorted(selected, key=lambda c: c.group), key=lambda c: c.group):
        natives: list[History] = []
        for case in some:
            outcomes[case] = outcome(rank, case, natives)
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
        natives.append(history(rank, api, option, (api.native or api.built)(option, dtype), units))
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
        every += api.gradients(model, units)
        # Changes nothing, but makes messages about changes due, for policies that send these.
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        model.zero_grad()
        if step + 1 < STEPS:
            resume()
    return History(sums, every)
