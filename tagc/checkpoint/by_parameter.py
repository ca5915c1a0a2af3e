"""State by parameter: which elements of which parameter a unit's tensors of state hold.

Tensors of state are shards with padding. A saved tensor has the parameter's own shape, so it means
the same for any number of ranks; with tensor parallelism, it has the shape of the sharding group's
box of the parameter. Padding is not saved: gradients are zero there, and so is the residual. (Only
the estimate of a group that was not peeled can put a value there, and no parameter needs it.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from tagc.codecs.feedback import OWNER_RESIDUAL, OWNER_STATES
from tagc.collect.reducer_state import ReducerState
from tagc.plan import Box, Segment, UnitParam, slices_of, span_of
from tagc.plan.param_slices import ParamSlice, param_slices


class Elements(NamedTuple):
    """Elements ``first`` to ``last``, excluding ``last``, of a flattened parameter, or of the
    sharding group's box of it."""

    first: int
    last: int


class Part(NamedTuple):
    """A part of a parameter. As text, it ends the name of a saved tensor."""

    box: Box | None  # with tensor parallelism; None for the whole parameter
    duplicate: tuple[int, int] | None  # index and number of tensor parallelism's, if several
    # Index and number of shards of the box; elements of it, if flat shards or slices cut it
    # anywhere; None for the whole box.
    shard: tuple[int, int] | Elements | None

    def __str__(self) -> str:
        text = ""
        if self.box is not None:
            start, stop = ("_".join(map(str, end)) for end in (self.box.start, self.box.stop))
            text += f".box_{start}_to_{stop}"
        if self.duplicate is not None:
            text += ".duplicate_{}_of_{}".format(*self.duplicate)
        if isinstance(self.shard, Elements):
            text += ".elements_{}_to_{}".format(*self.shard)
        elif self.shard is not None:
            text += ".shard_{}_of_{}".format(*self.shard)
        return text

    def boxes(self, shape: tuple[int, ...], dim: int) -> list[Box]:
        """The elements of a parameter of ``shape`` whose shards are cut along ``dim``, as boxes in
        the order of the saved tensor. Raises ValueError if the parameter has none of them."""
        own = Box.whole(shape) if self.box is None else self.box
        if len(own.start) != len(shape) or not all(
            0 <= first <= last <= size
            for first, last, size in zip(own.start, own.stop, shape, strict=True)
        ):
            raise ValueError(f"there is no such box in {list(shape)}")
        if isinstance(self.shard, Elements):
            first, last = self.shard
            if not 0 <= first < last <= own.numel:
                raise ValueError(f"there are no such elements in {list(own.shape)}")
            return list(own.runs(first, last))
        if self.shard is None:
            return [own]
        shard, shards = self.shard
        if not 0 <= shard < shards:
            raise ValueError(f"there is no shard {shard} of {shards}")
        return [own.narrow(dim, *span_of(own.shape[dim], shard, shards))]

    def shape(self, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """The shape of the saved tensor; arguments and errors as for :meth:`boxes`."""
        boxes = self.boxes(shape, dim)
        flat = isinstance(self.shard, Elements)
        return (sum(box.numel for box in boxes),) if flat else boxes[0].shape


_NUMBER = "[0-9]{1,15}"
_NAME = re.compile(
    rf"(?P<name>.*?)(\.box_(?P<start>{_NUMBER}(_{_NUMBER})*)_to_(?P<stop>{_NUMBER}(_{_NUMBER})*))?"
    rf"(\.duplicate_(?P<duplicate>{_NUMBER})_of_(?P<duplicates>{_NUMBER}))?"
    rf"(\.(?P<kind>shard|elements)_(?P<first>{_NUMBER})_(of|to)_(?P<last>{_NUMBER}))?",
    re.DOTALL,
)


def split_part(name: str) -> tuple[str, Part]:
    found = _NAME.fullmatch(name)
    assert found is not None  # everything in the part is optional
    box = duplicate = shard = None
    if found["start"] is not None:
        start, stop = (tuple(map(int, found[end].split("_"))) for end in ("start", "stop"))
        box = Box(start, tuple(last - first for first, last in zip(start, stop, strict=False)))
    if found["duplicate"] is not None:
        duplicate = int(found["duplicate"]), int(found["duplicates"])
    if found["kind"] is not None:
        shard = int(found["first"]), int(found["last"])
        shard = Elements(*shard) if found["kind"] == "elements" else shard
    return found["name"], Part(box, duplicate, shard)


# First and last element of the flattened part, and the rows and columns where they lie.
_Piece = tuple[int, int, slice, slice]


@dataclass(frozen=True, kw_only=True)
class ParamLocation:
    """Where the elements of a part of a parameter lie in a tensor of state ``[rows, columns]``."""

    param: UnitParam
    part: Part
    ranks: int = 1  # over which the unit's gradients are averaged
    # Blocks of rows and columns that hold the elements in order. If shards are cut along another
    # dimension than the first, all of them are in one block, a shard a row.
    pieces: tuple[_Piece, ...] = ()

    @property
    def boxes(self) -> list[Box]:
        return self.part.boxes(self.param.shape, self.param.dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the saved tensor: the parameter's, its box's or its shard's."""
        return self.part.shape(self.param.shape, self.param.dim)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def take(self, state: Tensor) -> Tensor:
        value = state.new_empty(self.shape)
        for here, there in self._pairs(state, value):
            there.copy_(here)
        return value

    def put(self, state: Tensor, value: Tensor) -> None:
        for here, there in self._pairs(state, value.contiguous()):
            here.copy_(there)

    def _pairs(self, state: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        dim = self.param.dim
        for first, last, rows, columns in self.pieces:
            block = state[rows, columns]
            if dim == 0:
                yield block, value.view(-1)[first:last].view(block.shape)
            else:
                before = math.prod(self.shape[:dim])
                across = value.view(before, len(block), -1).transpose(0, 1)
                yield block.view(across.shape), across


_Locate = Callable[[Segment], Iterator[ParamLocation]]


@dataclass(frozen=True, kw_only=True)
class UnitState:
    """The state by parameter of a unit in one direction: ``gradients`` or ``replicas``."""

    direction: str
    reducer: ReducerState
    shard: int  # index of this rank's shard of the unit's parameters
    shards: int
    replica: int = 0  # index of the replica that this rank is in
    # Tensors ``[S]`` that all replicas hold alike; see :attr:`tagc.site.anchor.Anchor.shared`.
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    owners: bool = True  # whether residuals of owners of slices are part of it

    @property
    def name(self) -> str:
        return f"unit.{self.direction}.{self.reducer.plan.info.label}"

    def residuals(self) -> Iterator[tuple[str, ParamLocation, Tensor]]:
        """For every parameter, the name in a state, the place, and the residual of its segment.

        With a lead, also what was ``sent`` last, which the owner of a shard keeps. With two shots
        across replicas, also the residual of the sum, which the owner of a slice keeps.

        Raises:
            ValueError: if a parameter is not sharded by rows (or columns) of equal number.
        """
        for kind, stored, locate in self._stored():
            for segment in self.reducer.plan.segments:
                if segment.start in stored:
                    for place in locate(segment):
                        name = f"{kind}.{self.direction}.{place.param.name}{place.part}"
                        yield name, place, stored[segment.start]

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Write saved tensors, by name, to the state, and zeros to its padding."""
        self.reducer.drop_owed()
        for tensor in self.shared.values():
            tensor.zero_()
        for name, place, tensor in self.residuals():
            place.put(tensor, values[name])

    def _stored(self) -> Iterator[tuple[str, Mapping[int, Tensor], _Locate]]:
        """Kinds of state, their tensors by first column of the segment, and what these hold."""
        reducer, plan = self.reducer, self.reducer.plan
        own = partial(self._in_shards, shard=self.shard)
        for kind, values in self.shared.items():
            yield kind, {s.start: values[None, s.start : s.stop] for s in plan.segments}, own
        owned: dict[str, dict[int, Tensor]] = {kind: {} for kind in OWNER_STATES}
        for i, state in reducer.owner_states.items():
            owned[str(reducer.rules[i].owner_state)][i] = state
        if plan.shots is not None:
            yield "residual", reducer.residuals, self._in_slices
            own = partial(self._in_slices, owner=self.replica)
            if self.owners:
                owned[OWNER_RESIDUAL] = reducer.owner_residuals
        elif plan.for_all:  # across replicas, a rank has a residual only for its own shard
            yield "residual", reducer.residuals, own
        elif plan.info.ranks_per_host == 1:
            yield "residual", reducer.residuals, self._in_shards
        else:  # one for each host: for the shard of the rank at this rank's position there
            R = plan.info.ranks_per_host
            for host in range(plan.messages.made):
                shard = host * R + self.shard % R
                of_host = partial(self._in_shards, shard=shard, row=host)
                yield "residual", reducer.residuals, of_host
        for kind, stored in owned.items():
            yield kind, stored, own

    def _in_shards(
        self, segment: Segment, shard: int | None = None, row: int = 0
    ) -> Iterator[ParamLocation]:
        """The places in a tensor that has one shard in ``row``, or all of them in its rows."""
        info = self.reducer.plan.info
        if info.flat is not None:
            yield from self._in_flat(segment, shard, row)
            return
        column = 0
        for param in segment.params:
            place = self._whole(param, shard)
            columns = slice(column, column + param.columns)
            column += param.columns
            if place is None:
                continue
            numel = place.numel
            full, rest = divmod(numel, param.columns)
            assert not (param.dim and rest)  # FSDP2 refuses it
            pieces: list[_Piece] = []
            if full:
                pieces.append((0, numel - rest, slice(row, row + full), columns))
            if rest:
                last = slice(columns.start, columns.start + rest)
                pieces.append((numel - rest, numel, slice(row + full, row + full + 1), last))
            yield replace(place, pieces=tuple(pieces))

    def _in_flat(self, segment: Segment, shard: int | None, row: int) -> Iterator[ParamLocation]:
        """:meth:`_in_shards` with FSDP1. In a shard, a parameter's elements are contiguous."""
        slices = list(param_slices(self.reducer.plan.info, segment.params))
        for param in segment.params:
            mine = [p for p in slices if p.param == param.name]
            if mine:
                yield from _cut(self._place(param, None), mine, shard, row)

    def _in_slices(self, segment: Segment, owner: int | None = None) -> Iterator[ParamLocation]:
        """The places in a tensor of two shots, which has a row for each owner of a slice, or the
        row of one."""
        slices = list(slices_of(self.reducer.plan, segment))
        for param in segment.params:
            place = self._whole(param, self.shard)
            if place is None:
                continue
            numel = place.numel  # the rest is padding
            mine = [
                replace(p, length=min(p.length, numel - p.offset))
                for p in slices
                if p.param == param.name and p.offset < numel
            ]
            # All shards have this many elements, except the last ones.
            yield from _cut(place, mine, owner, first=self.shard * param.columns)

    def _whole(self, param: UnitParam, shard: int | None) -> ParamLocation | None:
        """A shard of a parameter, or all of them; None if there is nothing in it."""
        if not param.columns:
            return None
        shape, shards = [*param.own.shape], self.shards
        shape[param.dim] = -(-shape[param.dim] // shards)
        if math.prod(shape) != param.columns:
            raise ValueError(
                f"the residual of {param.name} cannot be saved: its shards have {param.columns} "
                f"elements, but {shards} shards of {list(param.own.shape)} have "
                f"{math.prod(shape)}. Use only the placements Shard and Replicate for it, or codec "
                "dense"
            )
        place = self._place(param, None if shard is None else (shard, shards))
        return place if place.numel else None

    def _place(self, param: UnitParam, shard: tuple[int, int] | Elements | None) -> ParamLocation:
        part = Part(param.box, param.duplicate, shard)
        return ParamLocation(param=param, part=part, ranks=self.reducer.plan.info.world_size)


def _cut(
    place: ParamLocation,
    slices: Iterable[ParamSlice],
    owner: int | None,
    row: int = 0,
    *,
    first: int = 0,
) -> Iterator[ParamLocation]:
    """The place of a part that is cut into slices, which are in the rows of their owners. Of one
    owner, whose row is ``row``, a place for each slice, so that it means the same for other numbers
    of owners; the part begins at element ``first`` of the parameter."""
    pieces = [(p, slice(p.column, p.column + p.length)) for p in slices]
    if owner is None:
        blocks = ((p.offset, p.offset + p.length, slice(p.row, p.row + 1), c) for p, c in pieces)
        yield replace(place, pieces=tuple(blocks))
    for piece, columns in pieces:
        if piece.row == owner:
            start = first + piece.offset
            part = place.part._replace(shard=Elements(start, start + piece.length))
            block = 0, piece.length, slice(row, row + 1), columns
            yield replace(place, part=part, pieces=(block,))
