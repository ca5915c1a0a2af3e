"""States of copies of a model, loaded by other copies and shards."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tagc
from support.states import (
    Stored,
)
from tagc.checkpoint.locations import ParamLocation
from tagc.checkpoint.resharding import merged, plan_merge
from tagc.checkpoint.suffix import Elements
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


@pytest.mark.parametrize("kind", ["sent.replicas", "sent.gradients"])
@pytest.mark.parametrize("old", [(1, 2), (4, 3)])
@pytest.mark.parametrize("new", [(1, 2), (3, 5)])
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
