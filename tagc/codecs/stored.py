"""What columns store between steps, whatever the codec: residuals, and what an owner keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from tagc.codecs import delivery
from tagc.codecs.residual import Residual
from tagc.plan import Segment


@dataclass(frozen=True)
class Part:
    """One segment and what is stored of it.

    Attributes:
        residual: of this rank; None where its feedback has none.
        kept: by the owner, ``[columns]``, see :mod:`tagc.codecs.delivery`; likewise.
    """

    segment: Segment
    residual: Residual | None
    kept: Tensor | None


P = TypeVar("P", bound=Part)


class StoredColumns(Generic[P]):
    """The part of :class:`tagc.codecs.Columns` that all codecs with feedback share."""

    def __init__(self) -> None:
        self._parts: list[P] = []

    @property
    def parts(self) -> list[P]:
        """The segments."""
        return self._parts

    @property
    def residuals(self) -> dict[int, Residual]:
        """By first column of the segment in the unit."""
        return {p.segment.start: p.residual for p in self._parts if p.residual is not None}

    @property
    def kept(self) -> dict[int, Tensor]:
        """What the owner keeps, ``[1, columns]``, likewise. See :mod:`tagc.codecs.delivery`."""
        return {p.segment.start: p.kept[None] for p in self._parts if p.kept is not None}

    def warm_up(self, out: Tensor) -> None:
        """See :meth:`tagc.codecs.Columns.warm_up`."""
        for part in self._parts:
            columns = out[part.segment.start : part.segment.stop]
            delivery.warm_up(part.kept, part.segment.codec.feedback, columns)
