"""Boxes of parameters: runs of elements, names, and what one layout takes over from another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from support.states import Stored
from tagc.checkpoint.locations import ParamLocation, locations
from tagc.checkpoint.resharding import merged, plan_merge
from tagc.checkpoint.suffix import Elements, Suffix, split_suffix
from tagc.plan import Box, UnitInfo, UnitParam, build_plan, span_of
from tagc.policy import Policy


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 1, 1, 3)])
def test_runs_are_the_elements_in_order(shape: tuple[int, ...]) -> None:
    """Boxes of a tensor whose elements are their own places."""
    start = tuple(range(1, len(shape) + 1))
    box = Box(start, shape)
    whole = torch.arange(math.prod(box.stop)).view(box.stop)
    flat = whole[Box.whole(box.stop).index(box)].flatten()
    for first in range(box.numel):
        for last in range(first, box.numel + 1):
            runs = list(box.runs(first, last))
            found = [whole[Box.whole(box.stop).index(run)].flatten() for run in runs]
            assert torch.equal(torch.cat([flat[:0], *found]), flat[first:last])
            assert len(runs) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("suffix", "spelled"),
    [
        (Suffix(None, None, None), ""),
        (Suffix(Box((7, 0), (6, 5)), None, None), ".box_7_0_to_13_5"),
        (Suffix(None, (1, 2), (0, 3)), ".duplicate_1_of_2.shard_0_of_3"),
        (
            Suffix(Box((3,), (1,)), (0, 2), Elements(1, 2)),
            ".box_3_to_4.duplicate_0_of_2.elements_1_to_2",
        ),
    ],
)
def test_suffixes(suffix: Suffix, spelled: str) -> None:
    assert str(suffix) == spelled
    for name in ("a.weight", "a.box_1_to_2.b", "a.box_", "a.shard_1_of_2.weight", ""):
        assert split_suffix(f"{name}{suffix}") == (name, suffix)


@pytest.mark.parametrize(
    "name",
    [
        "p.box_0_to_4",  # too few dimensions
        "p.box_0_0_to_4_5",  # beyond the end
        "p.shard_2_of_2",
        "p.elements_3_to_3",
        "p.box_0_0_to_1_4.elements_0_to_5",
    ],
)
def test_parts_that_are_in_no_parameter(name: str) -> None:
    with pytest.raises(ValueError, match=r"there (is|are) no|zip"):
        split_suffix(name)[1].boxes((4, 4), 0)


# What one layout takes over from another


@dataclass(frozen=True)
class Mesh:
    """Sharding groups of ``data`` ranks, in hosts of some, for each of ``rows`` times ``columns``
    boxes of the parameter (or all of it, if ``divided`` is false). Owners have shards along ``dim``
    or, if ``flat``, as FSDP1 cuts them."""

    data: int
    rows: int = 1
    columns: int = 1
    per_host: int = 1
    divided: bool = True
    dim: int = 0
    flat: bool = False

    @property
    def ranks(self) -> int:
        return self.data * self.rows * self.columns

    def places(self, rank: int, kind: str) -> dict[str, ParamLocation]:
        """What a rank has of the parameter, by name: what it owes, or keeps as an owner."""
        shard, part = divmod(rank, self.rows * self.columns)
        box, duplicate = None, None
        if not self.divided:
            duplicate = part, self.rows * self.columns
        elif self.rows * self.columns > 1:
            box = Box.whole(SHAPE).narrow(0, *span_of(SHAPE[0], part // self.columns, self.rows))
            box = box.narrow(1, *span_of(SHAPE[1], part % self.columns, self.columns))
        param = UnitParam(
            name="p", shape=SHAPE, columns=0, dim=self.dim, box=box, duplicate=duplicate
        )
        about: list[tuple[int | None, Elements | None]] = [(None, None)]
        if kind == "residual" and self.per_host > 1:
            hosts = range(self.data // self.per_host)
            about = [(host * self.per_host + shard % self.per_host, None) for host in hosts]
        elif kind == "sent" and not self.flat:
            about = [(shard, None)]
        elif kind != "residual":
            elements = Elements(*span_of(param.own.numel, shard, self.data))
            about = [(None, Elements(elements.first, elements.first + elements.last))]
        found = [
            ParamLocation(
                param=param, start=0, shards=self.data, ranks=1, shard=shard, elements=elements
            )
            for shard, elements in about
        ]
        return {f"{kind}.replicas.p{place.suffix}": place for place in found if place.numel}


SHAPE = (7, 5)
MESHES = [
    Mesh(3),
    Mesh(2, rows=2),
    Mesh(2, columns=2, dim=1),
    Mesh(1, rows=2, columns=3),
    Mesh(4, rows=3, per_host=2),
    Mesh(2, rows=2, divided=False),
    Mesh(3, flat=True),
]


class Saved(Stored):
    """A source of random numbers, the same in duplicates, and their sum over ranks."""

    def __init__(self, mesh: Mesh, kind: str) -> None:
        self.whole = torch.zeros(SHAPE, dtype=torch.float64)
        super().__init__()
        generator = torch.Generator().manual_seed(mesh.ranks)
        for rank in range(mesh.ranks):
            places = mesh.places(rank, kind)
            values = {n: torch.randn(p.shape, generator=generator) for n, p in places.items()}
            # Only the first duplicate counts: the others are far from it here.
            self.tensors[rank] = values
            for name, place in places.items():
                if not (place.param.duplicate or (0, 0))[0]:
                    self.whole += spread(values[name], place)


def spread(value: Tensor, place: ParamLocation) -> Tensor:
    """A place's elements among zeros, found one by one."""
    own, whole = place.param.own, torch.zeros(SHAPE, dtype=torch.float64)
    inside = torch.zeros(own.shape, dtype=torch.float64)
    if place.elements is not None:
        inside.view(-1)[slice(*place.elements)] = value.double()
    else:
        inside.narrow(place.param.dim, *place.span).copy_(value)
    whole[tuple(map(slice, own.start, own.stop))] = inside
    return whole


@pytest.mark.parametrize("kind", ["residual", "sent", "owner_residual"])
@pytest.mark.parametrize("old", MESHES)
@pytest.mark.parametrize("new", MESHES)
def test_all_that_was_saved_is_taken_over_once(old: Mesh, new: Mesh, kind: str) -> None:
    source = Saved(old, kind)
    holdings = {rank: new.places(rank, kind) for rank in range(new.ranks)}
    if old.dim != new.dim and old.data > 1 and any(".shard_" in name for name in source.shapes(0)):
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
            duplicate = (place.param.duplicate or (0, 0))[0]
            sums[duplicate] = sums.get(duplicate, 0) + spread(part, place)
    merge.check("here", taken)
    assert len(sums) == (1 if new.divided else new.rows * new.columns)
    for total in sums.values():
        torch.testing.assert_close(total, source.whole, rtol=2.0**-20, atol=2.0**-20)
        assert torch.equal(total, sums[0])


def test_a_parameter_divided_in_another_way_is_named() -> None:
    """Half of its rows, by a placement that says nothing about which ones."""
    param = UnitParam(name="up.weight", shape=(128, 32), columns=1024, local=(32, 32))
    info = UnitInfo(name="block", params=(param,), world_size=2, dtype=torch.float32)
    rule = {"when": {"name": "*"}, "codec": {"kind": "quantized", "bits": 4}}
    (unit,) = build_plan([info], Policy.load({"schema": 1, "gradients": [rule]})).units
    with pytest.raises(
        ValueError,
        match=r"residual of up.weight cannot be saved.*1024 elements.*2048.*Shard and Replicate",
    ):
        list(locations(unit, {0: torch.zeros(2, 1024)}, 2, None))
