"""Where the residual of one parameter lies in the buffers of its unit.

Buffers are shards with padding; what is saved has the parameter's own shape, so that it means the
same for any number of ranks. Padding needs no place: gradients there are zero, and with them the
residual. (Only the estimate of a group that peeling left can put something there, which nobody is
owed.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tagc.pieces import Piece, pieces
from tagc.plan import Segment, UnitParam, UnitPlan


@dataclass(frozen=True, kw_only=True)
class Place:
    """A parameter's elements in the residual ``[D, columns]`` of its segment.

    Attributes:
        start: its first column in the segment.
        shards: rows of the parameter, one a shard.
        shard: the only shard that the residual is about; None for all of them.
        pieces: where it lies, if not in the same columns of every row.
    """

    param: UnitParam
    start: int
    shards: int
    shard: int | None = None
    pieces: tuple[Piece, ...] | None = None

    @property
    def suffix(self) -> str:
        """What tells this rank's shard from others, in the name of what is saved."""
        return "" if self.shard is None else f".shard_{self.shard}_of_{self.shards}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is saved: the parameter's, or its shard's."""
        return self._shape(self.span[1])

    @property
    def numel(self) -> int:
        """Elements that are saved."""
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
                flat[p.offset : p.offset + p.length] = source
            return flat.view(self.shape)
        rows = residual[:, self.start : self.start + self.param.columns]
        if self.param.dim == 0:
            return rows.reshape(-1)[: self.numel].reshape(self.shape).clone()
        pieces = rows.reshape(-1, *self._shape(self._chunk)).unbind()
        return (
            torch.cat(pieces, self.param.dim).narrow(self.param.dim, 0, self.span[1]).contiguous()
        )

    def put(self, residual: Tensor, value: Tensor) -> None:
        """Write ``value`` of shape ``shape`` there, and zeros to the padding (but of pieces, whose
        padding has no parameter: it was zero from the start)."""
        if self.pieces is not None:
            flat = value.reshape(-1)
            for p in self.pieces:
                piece = flat[p.offset : p.offset + p.length]
                residual[p.row, p.column : p.column + p.length] = piece
            return
        rows = residual[:, self.start : self.start + self.param.columns]
        size = self._chunk
        for i, row in enumerate(rows):
            first = min(i * size, value.shape[self.param.dim])
            length = min(size, value.shape[self.param.dim] - first)
            piece = value.narrow(self.param.dim, first, length).reshape(-1)
            row[: piece.numel()] = piece
            row[piece.numel() :] = 0

    @property
    def _length(self) -> int:
        return self.param.shape[self.param.dim]

    @property
    def _chunk(self) -> int:
        return -(-self._length // self.shards)

    def _shape(self, length: int) -> tuple[int, ...]:
        dim = self.param.dim
        return (*self.param.shape[:dim], length, *self.param.shape[dim + 1 :])


def span_of(length: int, shard: int, shards: int) -> tuple[int, int]:
    """First index and length of a shard of so many indices, as ``torch.chunk`` cuts them."""
    chunk = -(-length // shards)
    first = min(shard * chunk, length)
    return first, min(chunk, length - first)


def split_suffix(name: str) -> tuple[str, tuple[int, int] | None]:
    """The name without :attr:`Place.suffix`, and the shard and number of shards that it says."""
    found = re.fullmatch(r"(.*)\.shard_([0-9]{1,9})_of_([0-9]{1,9})", name, re.DOTALL)
    if found is None:
        return name, None
    return found[1], (int(found[2]), int(found[3]))


def places(
    unit: UnitPlan, residuals: dict[int, Tensor], shards: int, shard: int | None
) -> Iterator[tuple[Place, Tensor]]:
    """Every parameter of a unit that has a residual: its place, and the residual of its segment.

    Args:
        residuals: by first column of the segment, as a reducer has them.
        shards: of the parameters.
        shard: the only one that the residual is about, None for all.

    Raises:
        ValueError: if a parameter is not sharded by rows (or columns) of equal number, as by
            tensor parallelism in the same dimension.
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
                place = Place(param=param, start=at, shards=shards, shard=shard)
                _check(place)
                if place.numel:
                    yield place, residual
            at += param.columns


def _flat_places(
    unit: UnitPlan, segment: Segment, shards: int, shard: int | None
) -> Iterator[Place]:
    """A flat shard cuts parameters anywhere: what is of one shard only is saved in the whole
    parameter's shape too, with zeros where the other shards have theirs."""
    found = list(pieces(unit.info, segment.params))
    if shard is not None:
        found = [replace(piece, row=0) for piece in found if piece.row == shard]
    for param in segment.params:
        mine = tuple(piece for piece in found if piece.param == param.name)
        if mine:
            yield Place(param=param, start=mine[0].column, shards=shards, pieces=mine)


def _check(place: Place) -> None:
    param = place.param
    whole = torch.Size(place._shape(place._chunk)).numel()
    if whole != param.columns:
        raise ValueError(
            f"the residual of {param.name} cannot be saved: its shards have {param.columns} "
            f"elements, where {place.shards} shards of {list(param.shape)} have {whole}"
        )
