"""State by parameter: names of parts, and what one layout takes over from another.
Where elements lie in every layout is in `test_layouts.py`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tagc
from support.states import stored
from tagc.checkpoint.by_parameter import Elements, ParamLocation, Part, UnitState
from tagc.checkpoint.resharding import merged, plan_merge
from tagc.plan import Box, UnitInfo, UnitParam, build_plan, span_of
from tagc.policy import Policy


def test_a_parameter_divided_in_another_way_is_named() -> None:
    """Half of its rows, by a placement that says nothing about which ones."""
    param = UnitParam(name="a", shape=(128, 32), columns=1024, local=(32, 32))
    info = UnitInfo(name="block", params=(param,), world_size=2, dtype=torch.float32)
    rule = {"when": {"name": "a"}, "codec": {"kind": "quantized"}}
    (plan,) = build_plan([info], Policy.load({"schema": 1, "gradients": [rule]})).units
    reducer: Any = SimpleNamespace(
        plan=plan, residuals={0: torch.zeros(2, 1024)}, owner_states={}, rules={}
    )
    state = UnitState(direction="gradients", reducer=reducer, shard=0, shards=2)
    with pytest.raises(
        ValueError,
        match=r"residual of a cannot be saved.*1024 elements.*2048.*Shard and Replicate",
    ):
        list(state.residuals())


@dataclass(frozen=True)
class Mesh:
    """Sharding groups of ``data`` ranks, in hosts of some, for each of ``rows`` times ``columns``
    boxes of the parameter (or all of it, if ``divided`` is false). Owners have shards along ``dim``
    or, if ``flat``, as FSDP1 cuts them. All of it in some ``copies``."""

    data: int
    rows: int = 1
    columns: int = 1
    per_host: int = 1
    divided: bool = True
    dim: int = 0
    flat: bool = False
    copies: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.rows * self.columns * self.copies

    def places(self, rank: int, kind: str) -> dict[str, ParamLocation]:
        """What a rank has of the parameter, by name: what it owes, or keeps as an owner."""
        shard, group = divmod(rank // self.copies, self.rows * self.columns)
        box, duplicate = None, None
        if not self.divided:
            duplicate = group, self.rows * self.columns
        elif self.rows * self.columns > 1:
            box = Box.whole(SHAPE).narrow(0, *span_of(SHAPE[0], group // self.columns, self.rows))
            box = box.narrow(1, *span_of(SHAPE[1], group % self.columns, self.columns))
        param = UnitParam(
            name="p", shape=SHAPE, columns=0, dim=self.dim, box=box, duplicate=duplicate
        )
        shards: list[Any] = [None]
        if kind == "residual" and self.per_host > 1:
            hosts = range(self.data // self.per_host)
            shards = [(host * self.per_host + shard % self.per_host, self.data) for host in hosts]
        elif kind == "sent" and not self.flat:
            shards = [(shard, self.data)]
        elif kind != "residual":
            first, length = span_of(param.own.numel, shard, self.data)
            shards = [Elements(first, first + length)] if length else []
        found = [ParamLocation(param=param, part=Part(box, duplicate, of)) for of in shards]
        return {f"{kind}.replicas.p{place.part}": place for place in found if place.numel}


SHAPE = (7, 5)
MESHES = [
    Mesh(3),
    Mesh(2, columns=2, dim=1),
    Mesh(4, rows=3, per_host=2),
    Mesh(2, rows=2, divided=False),
    Mesh(3, copies=4),
    Mesh(2, flat=True, copies=2),
]


def spread(value: Tensor, place: ParamLocation) -> Tensor:
    """A place's elements among zeros."""
    whole = torch.zeros(SHAPE, dtype=torch.float64)
    pieces = value.double().flatten().split([box.numel for box in place.boxes])
    for box, piece in zip(place.boxes, pieces, strict=True):
        whole[Box.whole(SHAPE).index(box)] = piece.view(box.shape)
    return whole


@pytest.mark.parametrize("kind", ["residual", "sent", "owner_residual"])
def test_all_that_was_saved_is_taken_over_once(kind: str) -> None:
    for old, new in product(MESHES, repeat=2):
        check_merge(old, new, kind)


def check_merge(old: Mesh, new: Mesh, kind: str) -> None:
    generator = torch.Generator().manual_seed(old.ranks)
    ranks, whole = {}, torch.zeros(SHAPE, dtype=torch.float64)
    for rank in range(old.ranks):
        places = old.places(rank, kind)
        ranks[rank] = {n: torch.randn(p.shape, generator=generator) for n, p in places.items()}
        for name, place in places.items():
            # Only the first duplicate counts: the others are far from it here.
            if not (place.part.duplicate or (0, 0))[0]:
                whole += spread(ranks[rank][name], place)
    if kind != "residual":  # what owners keep is no debt: every copy has the mean of the copies
        whole *= new.copies / old.copies
    source = stored(ranks)
    holdings = {rank: new.places(rank, kind) for rank in range(new.ranks)}
    if old.dim != new.dim and old.data > 1 and any(".shard_" in name for name in ranks[0]):
        # Names do not say along which dimension shards are cut: they are refused, not mixed up.
        assert plan_merge(source, holdings, 0).dropped == [f"{kind}.replicas.p"]
        return
    sums: dict[int, Tensor] = {}
    taken = {}
    for rank, held in holdings.items():
        merge = plan_merge(source, holdings, rank)
        assert not merge.dropped
        taken[rank] = merge.taken
        for name, place in held.items():
            part = merged(source, merge.parts.get(name, []), place, torch.float32)
            duplicate = (place.part.duplicate or (0, 0))[0]
            sums[duplicate] = sums.get(duplicate, 0) + spread(part, place)
    merge.check("here", taken)
    with pytest.raises(tagc.StateError, match=r"of the \d+ elements"):
        merge.check("here", {})
    assert len(sums) == (1 if new.divided else new.rows * new.columns)
    for total in sums.values():
        torch.testing.assert_close(total, whole, rtol=2.0**-20, atol=2.0**-20)
        assert torch.equal(total, sums[0])
