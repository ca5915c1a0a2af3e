"""State by parameter: names of parts, where their elements lie, and what one layout takes over from
another."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tagc
from support.states import stored
from tagc.checkpoint.by_parameter import Elements, ParamLocation, Part, UnitState, split_part
from tagc.checkpoint.resharding import merged, plan_merge
from tagc.plan import Box, FlatBuffer, UnitInfo, UnitParam, UnitPlan, build_plan, slices_of, span_of
from tagc.plan.param_slices import param_slices
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
    ("part", "text"),
    [
        (Part(None, None, None), ""),
        (Part(Box((7, 0), (6, 5)), None, None), ".box_7_0_to_13_5"),
        (Part(None, (1, 2), (0, 3)), ".duplicate_1_of_2.shard_0_of_3"),
        (
            Part(Box((3,), (1,)), (0, 2), Elements(1, 2)),
            ".box_3_to_4.duplicate_0_of_2.elements_1_to_2",
        ),
    ],
)
def test_names_of_parts(part: Part, text: str) -> None:
    assert str(part) == text
    for name in ("a.weight", "a.box_1_to_2.b", "a.box_", "a.shard_1_of_2.weight", ""):
        assert split_part(f"{name}{part}") == (name, part)


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
        split_part(name)[1].boxes((4, 4), 0)


# Where elements lie

RULE = {"when": {"name": ["a", "b", "c"]}, "codec": {"kind": "quantized", "block": 32}}
LEAD = RULE | {"feedback": {"kind": "residual", "lead": 0.5}}
SHAPES = {"a": (6, 40), "n": (7,), "b": (5, 64), "c": (12, 8)}


def sharded(ranks: int, dim: int = 0, **options: Any) -> UnitInfo:
    """A unit whose parameters are cut along ``dim``, which must divide by the ranks if not 0."""
    params = []
    for name, shape in SHAPES.items():
        d = dim if len(shape) > 1 else 0
        local = (*shape[:d], -(-shape[d] // ranks), *shape[d + 1 :])
        params.append(UnitParam(name=name, shape=shape, columns=math.prod(local), dim=d))
    return UnitInfo(
        name="u", params=tuple(params), world_size=ranks, dtype=torch.float32, **options
    )


def planned(info: UnitInfo, rule: dict[str, Any]) -> UnitPlan:
    (unit,) = build_plan([info], Policy.load({"schema": 1, "gradients": [rule]}), gloo=True).units
    return unit


def row_of(plan: UnitPlan, shard: int, values: dict[str, Tensor]) -> Tensor:
    """A shard of the whole unit, with padding that is not a number, found one by one."""
    row = torch.full((plan.columns,), math.nan)
    for segment in plan.segments:
        column = segment.start
        for param in segment.params:
            pieces = values[param.name].chunk(plan.info.world_size, param.dim)
            mine = pieces[shard].flatten() if shard < len(pieces) else row[:0]
            row[column : column + len(mine)] = mine
            column += param.columns
    return row


def check_places(
    plan: UnitPlan, shard: int, kinds: dict[str, dict[int, Tensor]], values: dict[str, Tensor]
) -> None:
    """Whether what is taken has a parameter's elements; and what is put is taken again."""
    rules = dict.fromkeys(kinds.get("sent", ()), SimpleNamespace(owner_state="sent"))
    owed = [kinds["residual"], kinds.get("owner_residual", {}), kinds.get("sent", {})]

    def drop() -> None:
        for tensor in (tensor for of in owed for tensor in of.values()):
            tensor.zero_()

    reducer: Any = SimpleNamespace(
        plan=plan,
        rules=rules,
        residuals=owed[0],
        owner_residuals=owed[1],
        owner_states=owed[2],
        drop_owed=drop,
    )
    world_size = plan.info.world_size
    state = UnitState(
        direction="gradients", reducer=reducer, shard=shard, shards=world_size, replica=shard
    )
    if plan.shots is not None:
        state = replace(state, shard=0, shards=1)
    taken: dict[str, Tensor] = {}
    for name, place, tensor in state.residuals():
        whole = values[place.param.name]
        expected = [whole[Box.whole(whole.shape).index(box)].flatten() for box in place.boxes]
        taken[name] = place.take(tensor)
        assert taken[name].shape == place.shape
        assert torch.equal(taken[name].flatten(), torch.cat(expected)), name
        assert split_part(name)[1] == place.part
    assert len(taken) > 1
    state.put(taken)
    for name, place, tensor in state.residuals():
        assert torch.equal(place.take(tensor), taken[name])
    assert not any(tensor.isnan().any() for of in owed for tensor in of.values())


def values_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    sizes = [math.prod(shape) for shape in shapes.values()]
    numbers = torch.arange(1, sum(sizes) + 1, dtype=torch.float32).split(sizes)
    return {n: t.view(shapes[n]) for n, t in zip(shapes, numbers, strict=True)}


@pytest.mark.parametrize(("ranks", "dim", "per_host"), [(3, 0, 1), (4, 1, 1), (4, 0, 2)])
def test_shards_hold_their_elements(ranks: int, dim: int, per_host: int) -> None:
    plan = planned(sharded(ranks, dim, ranks_per_host=per_host), LEAD)
    values = values_of(SHAPES)
    rows = torch.stack([row_of(plan, shard, values) for shard in range(ranks)])
    for shard in range(ranks):
        held = rows if per_host == 1 else rows[shard % per_host :: per_host]
        kinds: dict[str, dict[int, Tensor]] = {"residual": {}, "sent": {}}
        for segment in plan.compressed:
            columns = slice(segment.start, segment.stop)
            kinds["residual"][segment.start] = held[:, columns].clone()
            kinds["sent"][segment.start] = rows[shard : shard + 1, columns].clone()
        check_places(plan, shard, kinds, values)


@pytest.mark.parametrize("whole", [False, True])
def test_shards_of_a_flat_buffer_hold_their_elements(whole: bool) -> None:
    ranks, values, start, params = 3, values_of(SHAPES), 0, []
    for name, shape in SHAPES.items():
        params.append(UnitParam(name=name, shape=shape, columns=math.prod(shape), start=start))
        start += math.prod(shape)
    columns = -(-start // ranks)
    info = UnitInfo(
        name="u",
        params=tuple(params),
        world_size=ranks,
        dtype=torch.float32,
        flat=FlatBuffer(columns=columns, whole=whole),
    )
    rule = LEAD | {"when": {"name": "*"}} if whole else LEAD
    plan = planned(info, rule)
    for shard in range(ranks):
        kinds: dict[str, dict[int, Tensor]] = {"residual": {}, "sent": {}}
        for segment in plan.compressed:
            rows = torch.full((ranks, segment.columns), math.nan)
            for piece in param_slices(info, segment.params):
                there = slice(piece.column, piece.column + piece.length)
                flat = values[piece.param].flatten()
                rows[piece.row, there] = flat[piece.offset : piece.offset + piece.length]
            kinds["residual"][segment.start] = rows
            kinds["sent"][segment.start] = rows[shard : shard + 1].clone()
        check_places(plan, shard, kinds, values)


def test_slices_of_two_shots_hold_their_elements() -> None:
    ranks, values = 3, values_of(SHAPES)
    params = tuple(
        UnitParam(name=name, shape=shape, columns=math.prod(shape))
        for name, shape in SHAPES.items()
    )
    info = UnitInfo(name="u", params=params, world_size=ranks, dtype=torch.float32, replicated=True)
    plan = planned(info, RULE | {"feedback": {"kind": "residual"}})
    assert plan.shots is not None
    for owner in range(ranks):
        kinds: dict[str, dict[int, Tensor]] = {"residual": {}, "owner_residual": {}}
        for segment, of_slices in zip(plan.segments, plan.shots.reduce.segments, strict=True):
            if segment.compressed:
                rows = torch.full((ranks, of_slices.columns), math.nan)
                for piece in slices_of(plan, segment):
                    there = slice(piece.column, piece.column + piece.length)
                    flat = values[piece.param].flatten()
                    rows[piece.row, there] = flat[piece.offset : piece.offset + piece.length]
                kinds["residual"][segment.start] = rows
                kinds["owner_residual"][segment.start] = rows[owner : owner + 1].clone()
        check_places(plan, owner, kinds, values)


def test_a_parameter_divided_in_another_way_is_named() -> None:
    """Half of its rows, by a placement that says nothing about which ones."""
    param = UnitParam(name="a", shape=(128, 32), columns=1024, local=(32, 32))
    plan = planned(UnitInfo(name="block", params=(param,), world_size=2, dtype=torch.float32), RULE)
    reducer: Any = SimpleNamespace(
        plan=plan, residuals={0: torch.zeros(2, 1024)}, owner_states={}, rules={}
    )
    state = UnitState(direction="gradients", reducer=reducer, shard=0, shards=2)
    with pytest.raises(
        ValueError,
        match=r"residual of a cannot be saved.*1024 elements.*2048.*Shard and Replicate",
    ):
        list(state.residuals())


# What one layout takes over from another


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
    Mesh(2, rows=2),
    Mesh(2, columns=2, dim=1),
    Mesh(1, rows=2, columns=3),
    Mesh(4, rows=3, per_host=2),
    Mesh(2, rows=2, divided=False),
    Mesh(3, flat=True),
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
@pytest.mark.parametrize("old", MESHES)
@pytest.mark.parametrize("new", MESHES)
def test_all_that_was_saved_is_taken_over_once(old: Mesh, new: Mesh, kind: str) -> None:
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
