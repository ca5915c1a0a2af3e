"""Locates the residual of one parameter in the buffers of its unit.

Buffers are shards with padding. A saved tensor has the parameter's own shape, so it means the same
for any number of ranks; with tensor parallelism, it has the shape of the sharding group's box of
the parameter. Padding is not saved: gradients are zero there, and so is the residual. (Only the
estimate of a group that was not peeled can put a value there, and no parameter needs it.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tagc.checkpoint.suffix import Elements, Suffix
from tagc.plan import Box, Segment, UnitParam, UnitPlan, slices_of, span_of
from tagc.plan.param_slices import ParamSlice, param_slices


@dataclass(frozen=True, kw_only=True)
class ParamLocation:
    """A parameter's elements in the residual ``[D, columns]`` of its segment.

    Attributes:
        start: its first column in the segment.
        shards: number of shards of the parameter.
        ranks: ranks over which its unit's gradients are averaged.
        shard: the only shard that the residual belongs to; None for all of them.
        elements: the only elements that it belongs to, if shards are flat and cut parameters
            anywhere, or are cut into slices; None for all of them.
        pieces: the slices where it lies, if these are not the same columns of every row.
    """

    param: UnitParam
    start: int
    shards: int
    ranks: int
    shard: int | None = None
    elements: Elements | None = None
    pieces: tuple[ParamSlice, ...] | None = None

    @property
    def suffix(self) -> Suffix:
        """The part of the parameter, which distinguishes saved tensors by name."""
        shard = self.elements
        if shard is None and self.shard is not None:
            shard = (self.shard, self.shards)
        return Suffix(self.param.box, self.param.duplicate, shard)

    @property
    def boxes(self) -> list[Box]:
        """The elements of the parameter, as boxes in the order of the saved tensor."""
        return self.suffix.boxes(self.param.shape, self.param.dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the saved tensor: the parameter's, its box's or its shard's."""
        if self.elements is not None:
            return (self.elements.last - self.elements.first,)
        return self._shape(self.span[1])

    @property
    def numel(self) -> int:
        """Number of elements that are saved."""
        return torch.Size(self.shape).numel()

    @property
    def span(self) -> tuple[int, int]:
        """First index and length along the sharded dimension, without padding."""
        if self.shard is None:
            return 0, self._length
        return span_of(self._length, self.shard, self.shards)

    def take(self, residual: Tensor) -> Tensor:
        """A copy of the parameter's elements, of shape ``shape``."""
        if self.pieces is not None:
            flat = residual.new_zeros(self.numel)
            for p in self.pieces:
                source = residual[p.row, p.column : p.column + p.length]
                self._piece_of(flat, p).copy_(source)
            return flat.view(self.shape)
        columns = self.param.columns
        rows = residual[:, self.start : self.start + columns]
        if self.param.dim == 0:
            flat = residual.new_empty(self.numel)
            whole, rest = divmod(self.numel, columns)
            flat[: whole * columns].view(whole, columns).copy_(rows[:whole])
            if rest:
                flat[whole * columns :].copy_(rows[whole, :rest])
            return flat.view(self.shape)
        pieces = rows.reshape(-1, *self._shape(self._chunk)).unbind()
        return (
            torch.cat(pieces, self.param.dim).narrow(self.param.dim, 0, self.span[1]).contiguous()
        )

    def put(self, residual: Tensor, value: Tensor) -> None:
        """Write ``value`` of shape ``shape`` to the parameter's elements, and zeros to the padding
        (except with pieces, whose padding is outside the pieces and zero from the start)."""
        if self.pieces is not None:
            flat = value.reshape(-1)
            for p in self.pieces:
                residual[p.row, p.column : p.column + p.length] = self._piece_of(flat, p)
            return
        rows = residual[:, self.start : self.start + self.param.columns]
        size = self._chunk
        for i, row in enumerate(rows):
            first = min(i * size, value.shape[self.param.dim])
            length = min(size, value.shape[self.param.dim] - first)
            piece = value.narrow(self.param.dim, first, length).reshape(-1)
            row[: piece.numel()] = piece
            row[piece.numel() :] = 0

    def _piece_of(self, flat: Tensor, piece: ParamSlice) -> Tensor:
        start = piece.offset - (0 if self.elements is None else self.elements.first)
        return flat[start : start + piece.length]

    @property
    def _length(self) -> int:
        return self.param.own.shape[self.param.dim]

    @property
    def _chunk(self) -> int:
        return -(-self._length // self.shards)

    def _shape(self, length: int) -> tuple[int, ...]:
        dim, shape = self.param.dim, self.param.own.shape
        return (*shape[:dim], length, *shape[dim + 1 :])


def locations(
    unit: UnitPlan, residuals: dict[int, Tensor], shards: int, shard: int | None
) -> Iterator[tuple[ParamLocation, Tensor]]:
    """For every parameter of a unit that has a residual, its place and its segment's residual.

    Args:
        residuals: by first column of the segment, as a reducer has them.
        shards: number of shards of the parameters.
        shard: the only shard that the residual belongs to; None for all.

    Raises:
        ValueError: if a parameter is not sharded by rows (or columns) of equal number.
    """
    for segment in unit.segments:
        residual = residuals.get(segment.start)
        if unit.info.flat is not None:
            if residual is not None:
                found = _flat_places(unit, segment, shards, shard)
                yield from ((place, residual) for place in found)
            continue
        at = 0
        for param in segment.params:
            if residual is not None and param.columns:
                place = _place(unit, param, at, shards, shard)
                _check(place)
                if place.numel:
                    yield place, residual
            at += param.columns


def _place(
    unit: UnitPlan, param: UnitParam, start: int, shards: int, shard: int | None
) -> ParamLocation:
    ranks = unit.info.world_size
    return ParamLocation(param=param, start=start, shards=shards, ranks=ranks, shard=shard)


def _flat_places(
    unit: UnitPlan, segment: Segment, shards: int, shard: int | None
) -> Iterator[ParamLocation]:
    for param in segment.params:
        mine = [
            piece for piece in param_slices(unit.info, segment.params) if piece.param == param.name
        ]
        elements = None
        if shard is not None:
            # The residual has one row, in which a parameter's elements are contiguous.
            mine = [replace(piece, row=0) for piece in mine if piece.row == shard]
            if mine:
                elements = Elements(mine[0].offset, mine[-1].offset + mine[-1].length)
        if mine:
            yield ParamLocation(
                param=param,
                start=mine[0].column,
                shards=shards,
                ranks=unit.info.world_size,
                elements=elements,
                pieces=tuple(mine),
            )


def slice_locations(
    unit: UnitPlan, residuals: dict[int, Tensor], shards: int, shard: int, owner: int | None = None
) -> Iterator[tuple[ParamLocation, Tensor]]:
    """:func:`locations` for a unit whose shards are cut into slices, with two shots.

    Args:
        residuals: ``[N, columns]``, or ``[1, columns]`` of an owner.
        owner: the owner of the only slice that the residuals belong to; None for all slices. With
            an owner there is a place for each run of neighbouring elements, in elements of the
            parameter, so that it means the same for other numbers of replicas.

    Raises:
        ValueError: as :func:`locations` does.
    """
    for segment in unit.segments:
        residual = residuals.get(segment.start)
        pieces = [] if residual is None else list(slices_of(unit, segment))
        for param in segment.params if pieces else ():
            place = _place(unit, param, segment.start, shards, shard)
            if not param.columns or not place.numel:
                continue
            _check(place)
            mine = tuple(_clipped(pieces, param, place.numel))
            assert residual is not None
            if owner is None:
                yield replace(place, pieces=mine), residual
                continue
            for piece in mine:
                if piece.row == owner:
                    # All shards have this many elements, except the last ones.
                    first = shard * param.columns + piece.offset
                    elements = Elements(first, first + piece.length)
                    only = (replace(piece, row=0, offset=first),)
                    yield replace(place, shard=None, elements=elements, pieces=only), residual


def _clipped(pieces: Sequence[ParamSlice], param: UnitParam, numel: int) -> Iterator[ParamSlice]:
    """The pieces of a parameter's shard, without its padding."""
    for piece in pieces:
        length = min(piece.length, numel - piece.offset)
        if piece.param == param.name and length > 0:
            yield replace(piece, length=length)


def _check(place: ParamLocation) -> None:
    param = place.param
    whole = torch.Size(place._shape(place._chunk)).numel()
    if whole != param.columns:
        raise ValueError(
            f"the residual of {param.name} cannot be saved: its shards have {param.columns} "
            f"elements, but {place.shards} shards of {list(param.own.shape)} have {whole}. "
            "Use only the placements Shard and Replicate for it, or codec dense"
        )
