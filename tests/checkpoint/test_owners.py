"""What owners of slices owe in two shots across replicas: saved, resumed, and handed to others."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tagc
from support.states import Stored
from support.units import unit_reducer
from tagc.checkpoint import UnitState
from tagc.checkpoint.locations import ParamLocation
from tagc.checkpoint.resharding import merged, plan_merge
from tagc.plan import UnitInfo, UnitParam, build_plan, in_two_shots
from tagc.policy import Policy

SHAPES = {"mlp.up.weight": (13, 8), "mlp.down.weight": (5, 2, 6), "norm.weight": (7,)}
QUANTIZED = {"kind": "quantized", "bits": 4, "block": 32}
MATRIX = {"kind": "matrix"}
KINDS = ("residual", "sent", "owner_residual")


def states(copies: int, shards: int, codec: dict[str, Any], lead: bool) -> list[UnitState]:
    """Those of all ranks, with something in every element of a parameter; nothing runs."""
    params = tuple(
        UnitParam(
            name=name,
            shape=shape,
            columns=-(-shape[0] // shards) * math.prod(shape[1:]),
            local=(-(-shape[0] // shards), *shape[1:]),
        )
        for name, shape in SHAPES.items()
    )
    info = UnitInfo(name="block", params=params, world_size=copies, dtype=torch.float32)
    feedback = {"kind": "residual", "lead": 0.5} if lead else {"kind": "residual"}
    rule = {"when": {"name": "mlp.*"}, "codec": codec, "feedback": feedback}
    dense = {"when": {}, "codec": {"kind": "dense"}}
    policy = Policy.load({"schema": 1, "gradients": [dense], "replicas": [rule]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # units as small as this may cost more compressed
        (plan,) = build_plan([info], policy, replicas=[info]).replicas
    if copies > 2 and plan.shots is None:
        plan = in_two_shots(plan)  # as larger ones would
    generator = torch.Generator().manual_seed(copies)
    made = [
        UnitState(
            direction="replicas",
            reducer=unit_reducer(plan),
            shard=rank % shards,
            shards=shards,
            replica=rank // shards,
        )
        for rank in range(copies * shards)
    ]
    for state in made:
        with state.opened() as residuals:
            for name, place, residual in residuals:
                value = torch.randn(place.shape, generator=generator)
                if name.startswith("sent") and plan.shots is None:
                    value.fill_(2.0)  # alike on all replicas
                place.put(residual, value)
    return made


class Source(Stored):
    """What these states save."""

    def __init__(self, made: Sequence[UnitState], *, alone: bool = False) -> None:
        self.alone = alone
        super().__init__()
        self.tensors = {
            rank: {name: place.take(tensor) for name, place, tensor in state.residuals()}
            for rank, state in enumerate(made)
        }


def totals(pieces: Iterator[tuple[str, ParamLocation, Tensor]]) -> dict[str, Tensor]:
    """The sums over all ranks, by kind and parameter, in the parameter's shape."""
    found = {
        f"{kind}.replicas.{name}": torch.zeros(shape, dtype=torch.float64)
        for kind in KINDS
        for name, shape in SHAPES.items()
    }
    for name, place, value in pieces:
        whole = next(t for start, t in found.items() if name.startswith(start))
        if place.elements is not None:
            whole.view(-1)[slice(*place.elements)] += value
        else:
            first, length = place.span
            whole[first : first + length] += value
    return found


@pytest.mark.parametrize("codec", [QUANTIZED, MATRIX])
@pytest.mark.parametrize("old", [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("new", [(4, 2), (3, 2), (5, 1), (2, 1), (2, 3)])
def test_what_is_owed_goes_to_other_replicas(
    codec: dict[str, Any], old: tuple[int, int], new: tuple[int, int]
) -> None:
    """Residuals are summed, and owners' go to the new owners; in one shot, which 2 copies take,
    there are none, and the first copy owes it, times the copies that an average divides it by. What
    was handed out last is in every copy what it was."""
    before = states(*old, codec, lead=True)
    source = Source(before)
    after = states(*new, codec, lead=True)
    holdings = {
        rank: {name: place for name, place, _ in state.residuals()}
        for rank, state in enumerate(after)
    }
    taken, given = {}, []
    for rank, held in holdings.items():
        merge = plan_merge(source, holdings, rank)
        assert not merge.dropped
        taken[rank] = merge.taken
        for name, place in held.items():
            value = merged(source, merge.parts.get(name, []), place, torch.float32)
            given.append((name, place, value))
    plan_merge(source, holdings, 0).check("here", taken)
    saved = totals((n, p, p.take(t)) for state in before for n, p, t in state.residuals())
    got = totals(iter(given))
    sliced = [made[0].reducer.plan.shots is not None for made in (before, after)]
    assert sliced == [old[0] > 2, new[0] > 2]
    for param in SHAPES:
        owed, sent, of_sums = (saved[f"{kind}.replicas.{param}"] for kind in KINDS)
        assert of_sums.any() == (sliced[0] and param != "norm.weight")
        if not sliced[1]:
            owed, of_sums = owed + new[0] * of_sums, 0 * of_sums
        sent = sent / (1 if sliced[0] else old[0]) * (1 if sliced[1] else new[0])
        for kind, expected in zip(KINDS, (owed, sent, of_sums), strict=True):
            off = (got[f"{kind}.replicas.{param}"] - expected).abs()
            assert bool((off <= 2.0**-22 * (8 + expected.abs())).all()), kind


def test_one_ranks_state_does_not_do_for_others() -> None:
    """What the other owners owed is theirs."""
    before, after = states(4, 1, QUANTIZED, lead=False), states(2, 2, QUANTIZED, lead=False)
    holdings = {0: {name: place for name, place, _ in after[0].residuals()}}
    with pytest.raises(tagc.StateError, match="Load the states of all ranks"):
        plan_merge(Source(before[:1], alone=True), holdings, 0)
