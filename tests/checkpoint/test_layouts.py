"""One property of checkpoints: whatever the policy, the layout and the format, the same ranks go on
as if nothing had happened, to the bit, and other ranks owe together what was owed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tagc
from support import parallel_net, small_net
from support.distributed import run_ranks
from support.exact import equal
from support.layouts import Kept, Layout, kept, totals
from support.marks import slow
from support.small_net import local_weights
from support.states import (
    MATRIX,
    POLICIES,
    SAVERS,
    load,
    rules,
    save,
    set_weights,
    shipped,
    snapshot,
)
from tagc.policy import data_parallel_policies

FLAT = [Layout(2), Layout(3), Layout(4)]
HOSTS = [Layout(4, per_host=2), Layout(6, per_host=3), Layout(6, per_host=2)]
DDP = [Layout(3, "DDP"), Layout(4, "DDP")]  # the same codecs in two shots
REPLICATE = [Layout(3, "replicate"), Layout(4, "replicate")]
FSDP1 = [Layout(2, "FSDP1"), Layout(3, "FSDP1"), Layout(4, "FSDP1")]
REPLICAS = [Layout(2, replicas=2), Layout(1, replicas=3)]
TENSOR = [Layout(4, tensor=1), Layout(2, tensor=2), Layout(3, tensor=1), Layout(2, tensor=3)]
REPLICAS_OF_TENSOR = [Layout(2, tensor=2, replicas=2)]

# FSDP1 gathers its parameters itself, and cuts matrices anywhere.
ONLY_FSDP2 = {name for name in POLICIES if name.startswith(("matrix", "changes", "parameters"))}
ONLY_FSDP2 |= {"inside", "inside warming up"}
# `auto` chooses anew (`tests/costs/test_auto.py`), and `dense` owes nothing.
SHIPPED = sorted(set(data_parallel_policies()) - {"auto", "dense"})


def cases() -> list[Any]:
    """Policy, format, the ranks that save, and those that load."""
    draw = random.Random(4)
    found = []
    for policy in POLICIES:
        for group in (
            FLAT + HOSTS,
            FLAT + FSDP1,
            TENSOR,
            REPLICAS,
            REPLICAS_OF_TENSOR,
            DDP,
            REPLICATE,
        ):
            if policy in ONLY_FSDP2 and group == FLAT + FSDP1:
                continue
            if "shared" in policy and group in (REPLICAS, REPLICAS_OF_TENSOR, DDP, REPLICATE):
                continue  # replicas have no owner who chooses
            for same in (True, False):
                old, new = draw.sample(group, 2) if len(group) > 1 else group * 2
                if (
                    not same
                    and group in (DDP, REPLICATE)
                    and ("lead" in policy or policy == "matrix average")
                ):
                    continue  # each replica has the last sum; two shots pay for 3 ranks only
                if same or group not in (REPLICAS, REPLICAS_OF_TENSOR):
                    case = policy, draw.choice(SAVERS), old, old if same else new
                    # With `replicate` the codecs are those of DDP.
                    rare = group is REPLICATE and policy not in ("quantized residual", "sketch")
                    many = max(old.ranks, new.ranks) > 4  # a larger pool of processes
                    is_slow = rare or many or group is REPLICAS_OF_TENSOR
                    found.append(slow(*case) if is_slow else case)
    for i, name in enumerate(SHIPPED):
        dtypes = [torch.bfloat16] if name == "exact" else [None]
        dtypes += [torch.bfloat16] if name in ("attn-only", "hosts", "mz-hybrid") else []
        twos = [Layout(2, dtype=dtype) for dtype in dtypes]
        found += [(name, SAVERS[i % 2], two, two) for two in twos]
    return found


def of(policy: str, layout: Layout) -> dict[str, Any]:
    """The policy for the layout's model, and for replicas alike."""
    chosen = POLICIES.get(policy) or shipped(policy)
    if layout.tensor:
        of_both = '"first.*.weight", "second.*.weight"'
        chosen = json.loads(json.dumps(chosen).replace(of_both, '"mlp.*"'))
    if layout.replicas > 1:
        chosen = chosen | {"replicas": chosen["gradients"]}
    return chosen


def saves(
    rank: int, layout: Layout, policy: dict[str, Any], saver: str, folder: Path
) -> tuple[Kept, dict[str, Tensor], dict[str, Any]]:
    """What it kept, its weights, and what became of it a step later."""
    model = layout.wrapped(policy)
    layout.run(model, rank, range(3))
    save(model, folder, saver)
    weights, mine = local_weights(model), kept(model, layout.shapes)
    layout.run(model, rank, range(3, 4))
    return mine, weights, snapshot(model)


def loads(
    rank: int,
    layout: Layout,
    policy: dict[str, Any],
    saver: str,
    folder: Path,
    weights: list[dict[str, Tensor]] | None,
) -> tuple[Kept, dict[str, Any]]:
    """Likewise, with the weights of the ranks that saved, if they are the same."""
    model = layout.wrapped(policy)
    layout.run(model, rank, range(1))  # so that there is something to replace
    if weights is None:
        tagc.compressor(model).load(folder)
    else:
        set_weights(model, weights[rank])
        load(model, folder, saver)
    mine = kept(model, layout.shapes)
    layout.run(model, rank, range(3, 4))
    assert tagc.compressor(model).metrics().unresolved == 0
    return mine, snapshot(model)


@pytest.mark.some(8)
@pytest.mark.parametrize(("policy", "saver", "old", "new"), cases(), ids=str)
def test_nothing_is_forgotten(
    tmp_path: Path, policy: str, saver: str, old: Layout, new: Layout
) -> None:
    saved = run_ranks(saves, old.ranks, old, of(policy, old), saver, tmp_path)
    weights = [weights for _, weights, _ in saved] if old == new else None
    loaded = run_ranks(loads, new.ranks, new, of(policy, new), saver, tmp_path, weights)
    if old == new:
        for (_, _, mine), (_, theirs) in zip(saved, loaded, strict=True):
            equal(theirs, mine)
    after = [mine for mine, _ in loaded]
    before = totals([mine for mine, _, _ in saved])
    conserved(before, after, narrow="bfloat16" in policy or policy in SHIPPED)
    owes_nothing = ("quantized none", "quantized dithered", "warming up", "stateless", "exact")
    owes = policy not in owes_nothing
    assert any(total.any() for found in before.values() for total in found) == owes


@pytest.mark.parametrize(
    "new", [slow(Layout(4, "DDP", per_host=2)), Layout(2, "replicate")], ids=str
)
def test_averages_that_owners_owed_become_sums(tmp_path: Path, new: Layout) -> None:
    """Where two shots become one, an average is worth as many gradients as there are ranks, however
    many of them have the same part of a parameter."""
    policy, old = POLICIES["quantized residual"], Layout(3, "DDP")
    saved = run_ranks(saves, old.ranks, old, policy, "safetensors", tmp_path)
    loaded = run_ranks(loads, new.ranks, new, policy, "safetensors", tmp_path, None)
    before = totals([mine for mine, _, _ in saved])
    averages = {name: found for name, found in before.items() if name.startswith("owner")}
    expected = {name: found for name, found in before.items() if name not in averages}
    for name, (average,) in averages.items():
        assert average.any()
        expected[name.removeprefix("owner_")][0] += new.ranks * average
    conserved(expected, [mine for mine, _ in loaded], narrow=False)


def conserved(before: dict[str, list[Tensor]], new: list[Kept], *, narrow: bool) -> None:
    """Whether the new ranks keep the totals."""
    after = totals(new)
    sizes = totals([{name: (i, t.abs()) for name, (i, t) in of.items()} for of in new])
    assert before.keys() == after.keys()
    for name, (exact, *_) in before.items():
        # Each new rank rounds its own sum once, by half a unit in the last place at most.
        bound = (2.0**-8 if narrow else 2.0**-24) * sizes[name][0] + 1e-37
        for total in after[name]:
            assert bool(((total - exact).abs() <= bound).all()), name
            assert bool((total == after[name][0]).all()), f"duplicates of {name} differ"


def first_step(rank: int, layout: Layout, policy: Any) -> tuple[Kept, dict[str, Tensor]]:
    """What a rank owes after it, by parameter, and the gradients of its data in a whole model."""
    model = layout.wrapped(policy)
    layout.run(model, rank, range(1))
    if layout.tensor:
        torch.manual_seed(1)
        alone: torch.nn.Module = parallel_net.Block()
        parallel_net.loss_of(alone, rank // layout.tensor, 0).backward()
    else:
        alone = small_net.net()
        small_net.loss_of(alone, rank, 0).backward()
    grads = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    return kept(model, layout.shapes), grads


IN_TWO_SHOTS = [DDP[0], REPLICATE[0]]
ONE_HOST_EACH = [FLAT[1], FSDP1[1], TENSOR[1]]


@pytest.mark.parametrize(
    "layout", [*ONE_HOST_EACH, HOSTS[0], Layout(4, "DDP", per_host=2), *IN_TWO_SHOTS], ids=str
)
def test_what_is_owed_lies_where_the_gradient_does(layout: Layout) -> None:
    """Under the parameter's name: what is not sent in the first step is the gradient itself. Ranks
    of a host owe their sum, tensor-parallel ones their parts."""
    policy = of("sketch", layout)
    if layout in IN_TWO_SHOTS:
        policy = rules(MATRIX, {"kind": "residual"})
    ranks = run_ranks(first_step, layout.ranks, layout, policy)
    together = layout.tensor or layout.per_host or 1
    for first in range(0, layout.ranks, together):
        some = ranks[first : first + together]
        owed = {name: parts[0] for name, parts in totals([mine for mine, _ in some]).items()}
        matrices = [
            n for n, whole in owed.items() if n.startswith("residual.") and whole.numel() > 40
        ]
        assert matrices
        for name in matrices:
            grads = [grads[name.removeprefix("residual.gradients.")] for _, grads in some]
            grad = sum(grads[: layout.per_host or 1], torch.zeros(())).double()
            same = torch.isclose(owed[name], grad, rtol=1e-4, atol=0)
            assert same.float().mean() > 0.4, (name, same.float().mean())
