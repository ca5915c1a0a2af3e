"""Checkpoints of every policy, layout and format: the same ranks go on to the bit, and other ranks
owe together what was owed."""

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
    POLICIES,
    SAVERS,
    load,
    save,
    set_weights,
    shipped,
    snapshot,
)

FLAT = [Layout(2), Layout(3), Layout(4)]
HOSTS = [Layout(4, per_host=2)]
FSDP1 = [Layout(2, "FSDP1"), Layout(3, "FSDP1"), Layout(4, "FSDP1")]
TENSOR = [Layout(4, tensor=1), Layout(2, tensor=2), Layout(3, tensor=1)]
REPLICAS = [Layout(2, replicas=2), Layout(1, replicas=3)]
DDP = [Layout(3, "DDP"), Layout(4, "DDP")]  # the same codecs in two shots
REPLICATE = [Layout(3, "replicate"), Layout(4, "replicate")]
GROUPS = [FLAT + HOSTS, FLAT + FSDP1, TENSOR, REPLICAS, DDP, REPLICATE]

# FSDP1 gathers its parameters itself, and cuts matrices anywhere.
ONLY_FSDP2 = ("matrix", "changes", "parameters", "inside")


def fits(policy: str, group: list[Layout]) -> bool:
    if group == FLAT + FSDP1:
        return not policy.startswith(ONLY_FSDP2)
    # Replicas have no owner who chooses.
    return "shared" not in policy or group in (FLAT + HOSTS, TENSOR)


def of(policy: str, layout: Layout) -> dict[str, Any]:
    """The policy for the layout's model, and for replicas alike."""
    chosen = POLICIES.get(policy) or shipped(policy)
    if layout.tensor:
        of_both = '"first.*.weight", "second.*.weight"'
        chosen = json.loads(json.dumps(chosen).replace(of_both, '"mlp.*"'))
    if layout.replicas > 1:
        chosen = chosen | {"replicas": chosen["gradients"]}
    return chosen


QUICK = [
    ("sketch shared", "safetensors", Layout(2, tensor=2)),
    ("quantized average", "dcp", Layout(3, "DDP")),
    ("matrix lead", "safetensors", Layout(1, replicas=3)),
    ("inside and changes", "dcp", Layout(4, per_host=2)),
    ("whole lead", "dcp", Layout(2, "FSDP1")),
    ("exact", "safetensors", Layout(2, dtype=torch.bfloat16)),
]


def one_of_each_group() -> list[Any]:
    """With every policy."""
    draw = random.Random(4)
    every = [
        (policy, draw.choice(SAVERS), draw.choice(group))
        for policy in POLICIES
        for group in GROUPS
        if fits(policy, group)
    ]
    return [slow(*case) for case in every if case not in QUICK]


@pytest.mark.parametrize(("policy", "saver", "layout"), [*QUICK, *one_of_each_group()], ids=str)
def test_the_same_ranks_go_on_to_the_bit(
    tmp_path: Path, policy: str, saver: str, layout: Layout
) -> None:
    ranks = run_ranks(goes_on, layout.ranks, layout, of(policy, layout), saver, tmp_path)
    owes_nothing = (
        "quantized none",
        "quantized dithered",
        "warming up",
        "inside warming up",
        "exact",
    )
    owes = policy not in owes_nothing
    assert any(total.any() for found in totals(ranks).values() for total in found) == owes


def goes_on(rank: int, layout: Layout, policy: dict[str, Any], saver: str, folder: Path) -> Kept:
    """Train on after a save, and once more from what was saved; what a rank keeps."""
    model = layout.wrapped(policy)
    layout.run(model, rank, range(2))
    save(model, folder, saver)
    weights, mine = local_weights(model), kept(model, layout.shapes)
    metrics = vars(tagc.compressor(model).metrics())
    layout.run(model, rank, range(2, 4))
    resumed = layout.wrapped(policy)
    layout.run(resumed, rank, range(1))  # so that there is something to replace
    set_weights(resumed, weights)
    load(resumed, folder, saver)
    equal(vars(tagc.compressor(resumed).metrics()), metrics)
    layout.run(resumed, rank, range(2, 4))
    equal(snapshot(resumed), snapshot(model))
    assert tagc.compressor(resumed).metrics().unresolved == 0
    return mine


def saves(rank: int, layout: Layout, policy: dict[str, Any], saver: str, folder: Path) -> Kept:
    model = layout.wrapped(policy)
    layout.run(model, rank, range(2))
    save(model, folder, saver)
    return kept(model, layout.shapes)


def loads(rank: int, layout: Layout, policy: dict[str, Any], folder: Path) -> Kept:
    model = layout.wrapped(policy)
    layout.run(model, rank, range(1))
    tagc.compressor(model).load(folder)
    mine = kept(model, layout.shapes)
    layout.run(model, rank, range(3, 4))
    return mine


@pytest.mark.parametrize(
    ("policy", "saver", "old", "new"),
    [
        ("quantized residual", "safetensors", Layout(2, "FSDP1"), Layout(3, "FSDP1")),
        ("sketch bfloat16", "dcp", Layout(4, per_host=2), Layout(2)),
        slow("whole lead", "dcp", Layout(3), Layout(2, "FSDP1")),
        slow("matrix lead", "safetensors", Layout(2, tensor=2), Layout(4, tensor=1)),
        slow("quantized average", "dcp", Layout(4, "DDP"), Layout(3, "DDP")),
        slow("changes", "safetensors", Layout(3), Layout(4, per_host=2)),
    ],
    ids=str,
)
def test_other_ranks_owe_together_what_was_owed(
    tmp_path: Path, policy: str, saver: str, old: Layout, new: Layout
) -> None:
    saved = run_ranks(saves, old.ranks, old, of(policy, old), saver, tmp_path)
    loaded = run_ranks(loads, new.ranks, new, of(policy, new), tmp_path)
    conserved(totals(saved), loaded, narrow="bfloat16" in policy)


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


@pytest.mark.parametrize("layout", [FSDP1[1], TENSOR[1], HOSTS[0], DDP[0]], ids=str)
def test_what_is_owed_lies_where_the_gradient_does(layout: Layout) -> None:
    """Under the parameter's name: what is not sent in the first step is the gradient itself. Ranks
    of a host owe their sum, tensor-parallel ones their parts."""
    policy = of("sketch", layout)
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
