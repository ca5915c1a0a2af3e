"""States of copies of a model, loaded by other copies and shards."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import tagc
from support.distributed import on_ranks
from support.states import (
    LEAD,
    QUANTIZED,
    Stored,
    residual_sums,
    rules,
    run,
    shared_folder,
    wrapped,
)
from tagc.checkpoint import unit_state
from tagc.checkpoint.locations import ParamLocation
from tagc.checkpoint.resharding import merged, plan_merge
from tagc.checkpoint.suffix import Elements
from tagc.codecs.feedback import LeadFeedback
from tagc.plan import UnitParam


def place_of(param: UnitParam, shard: int, shards: int, flat: bool = False) -> ParamLocation:
    """Of one shard; flat ones cut a parameter anywhere."""
    if not flat:
        return ParamLocation(param=param, start=0, shards=shards, ranks=1, shard=shard)
    numel = math.prod(param.shape)
    size = -(-numel // shards)
    elements = Elements(min(numel, shard * size), min(numel, (shard + 1) * size))
    return ParamLocation(param=param, start=0, shards=shards, ranks=1, elements=elements)


def part_of_place(whole: Tensor, place: ParamLocation) -> Tensor:
    if place.elements is not None:
        return whole.flatten()[slice(*place.elements)]
    first, length = place.span
    return whole[first : first + length]


class Copies(Stored):
    """A source of what replicas have: `copies` of a parameter, each in `shards`."""

    def __init__(
        self,
        param: UnitParam,
        copies: int,
        shards: int,
        kind: str = "residual.replicas",
        flat: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(copies * 10 + shards)
        self.whole = torch.randn(copies, *param.shape, generator=generator)
        super().__init__()
        for i in range(copies * shards):
            place = place_of(param, i % shards, shards, flat)
            if place.numel:
                piece = part_of_place(self.whole[i // shards], place)
                self.tensors[i] = {f"{kind}.p{place.suffix}": piece}


@pytest.mark.parametrize("old", [(2, 2), (3, 1), (1, 4), (4, 3)])
@pytest.mark.parametrize("new", [(2, 2), (2, 3), (1, 2), (3, 5)])
def test_replicas_of_other_shapes(old: tuple[int, int], new: tuple[int, int]) -> None:
    param = UnitParam(name="p", shape=(7, 3), columns=0)
    source = Copies(param, *old)
    copies, shards = new
    holdings: dict[int, dict[str, ParamLocation]] = {}
    for i in range(copies * shards):
        place = ParamLocation(param=param, start=0, shards=shards, ranks=1, shard=i % shards)
        holdings[i] = {f"residual.replicas.p{place.suffix}": place} if place.numel else {}
    total = torch.zeros(param.shape, dtype=torch.float64)
    taken = {}
    for rank, held in holdings.items():
        merge = plan_merge(source, holdings, rank)
        taken[rank] = merge.taken
        assert not merge.dropped
        for name, place in held.items():
            first, length = place.span
            part = merged(source, merge.parts[name], place, torch.float32)
            total[first : first + length] += part
    merge.check("here", taken)
    exact = source.whole.double().sum(0)
    bound = 2.0**-24 * source.whole.double().abs().sum(0) * copies
    assert ((total - exact).abs() <= bound).all()
    taken[0] = {}
    with pytest.raises(tagc.StateError, match=r"of the \d+ elements"):
        merge.check("here", taken)


@pytest.mark.parametrize("kind", ["sent.replicas", "sent.gradients"])
@pytest.mark.parametrize("old", [(1, 2), (2, 2), (3, 1), (4, 3)])
@pytest.mark.parametrize("new", [(1, 2), (2, 3), (3, 5)])
@pytest.mark.parametrize("flat", [(False, False), (False, True), (True, False), (True, True)])
def test_every_copy_keeps_the_mean_of_the_copies(
    kind: str, old: tuple[int, int], new: tuple[int, int], flat: tuple[bool, bool]
) -> None:
    """What an owner hands out is no debt: with as much as before in every copy, their average is
    what it was. Across replicas all copies are equal, and so is the mean, to the bit."""
    param = UnitParam(name="p", shape=(7, 3), columns=0)
    source = Copies(param, *old, kind, flat[0])
    if kind.endswith("replicas"):
        source.whole[:] = source.whole[0]
    exact = source.whole.double().mean(0)
    copies, shards = new
    holdings: dict[int, dict[str, ParamLocation]] = {}
    for i in range(copies * shards):
        place = place_of(param, i % shards, shards, flat[1])
        holdings[i] = {f"{kind}.p{place.suffix}": place} if place.numel else {}
    taken = {}
    for rank, held in holdings.items():
        merge = plan_merge(source, holdings, rank)
        taken[rank] = merge.taken
        assert not merge.dropped
        for name, place in held.items():
            part = merged(source, merge.parts[name], place, torch.float32)
            assert torch.equal(part, part_of_place(exact, place).float())
    merge.check("here", taken)
    taken[0] = {}
    with pytest.raises(tagc.StateError, match=r"of the \d+ elements"):
        merge.check("here", taken)


@on_ranks(2)
def test_an_average_does_not_do_for_what_was_sent(rank: int, world_size: int) -> None:
    """Forced from feedback `momentum`, which an earlier version had, to a lead, which then starts
    without a last sum."""
    model = wrapped(rules(QUANTIZED, LEAD | {"lead": 0.5}))
    run(model, rank, range(2))
    other = wrapped(rules(QUANTIZED, LEAD))
    with shared_folder() as folder:
        with (
            patch.object(LeadFeedback, "owner_state", "average"),
            patch.object(unit_state, "OWNER_STATES", ("average",)),
        ):
            tagc.compressor(model).save(folder)
        with pytest.raises(tagc.StateError, match="saved with policy"):
            tagc.compressor(other).load(folder)
        with pytest.warns(UserWarning, match="average of gradients of first.0.weight"):
            tagc.compressor(other).load(folder, force=True)
    state = residual_sums(other)
    assert state["first.0.weight"].any()
    assert not state["sent of first.0.weight"].any()
