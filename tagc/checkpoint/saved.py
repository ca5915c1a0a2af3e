"""A residual that a rank saved, and its overlap with the place of another residual."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from tagc.checkpoint.locations import ParamLocation
from tagc.checkpoint.suffix import Elements, Suffix
from tagc.plan import Box


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The residual that a rank saved under a name, for a whole parameter or a part.

    Attributes:
        part: the part of the parameter.
        share: the share of the residual that is taken over.
    """

    rank: int
    name: str
    part: Suffix
    shape: tuple[int, ...]
    share: float = 1.0

    @property
    def numel(self) -> int:
        """Number of elements that were saved."""
        return math.prod(self.shape)

    @property
    def duplicate(self) -> int:
        """Index among tensor parallelism's duplicates, from 0."""
        return 0 if self.part.duplicate is None else self.part.duplicate[0]

    def fits(self, place: ParamLocation) -> bool:
        """Whether it belongs to a parameter of this place's shape."""
        try:
            boxes = self.boxes(place)
        except ValueError:
            return False
        if isinstance(self.part.shard, Elements):
            return self.shape == (sum(box.numel for box in boxes),)
        return self.shape == boxes[0].shape

    def boxes(self, place: ParamLocation) -> list[Box]:
        """Its elements in a parameter of this place's shape, as boxes."""
        return self.part.boxes(place.param.shape, place.param.dim)

    def overlaps(self, place: ParamLocation) -> Iterator[tuple[int, Box, int, Box, Box]]:
        """Its overlaps with a place, each as first element and box in the saved tensor, first
        element and box in the place, and the box of the elements that are in both."""
        theirs, ours = _with_offsets(self.boxes(place)), _with_offsets(place.boxes)
        for (start, source), (at, target) in product(theirs, ours):
            both = source.overlap(target)
            if both is not None:
                yield start, source, at, target, both

    def numel_for(self, place: ParamLocation) -> int:
        """Number of elements that it has for a place."""
        return sum(both.numel for *_, both in self.overlaps(place))


def _with_offsets(boxes: Sequence[Box]) -> list[tuple[int, Box]]:
    offsets = accumulate((box.numel for box in boxes), initial=0)
    return list(zip(offsets, boxes, strict=False))
