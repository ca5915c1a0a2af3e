"""The codecs of what a unit gathers, one for every segment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tagc.codecs import Codec, CodecSetup, kind_of
from tagc.comm.gatherer import GatherSetup
from tagc.plan import Segment


class SegmentCodecs:
    """A codec a segment: in a gather, words lie in the order of the columns."""

    def __init__(self, setup: GatherSetup) -> None:
        plan = setup.plan
        made_for = CodecSetup(
            destinations=1,
            world_size=plan.sources,
            dtype=plan.info.dtype,
            ops=setup.ops,
            device=setup.device,
            workspace=setup.workspace,
        )
        self._parts: list[tuple[Segment, Codec[Any]]] = [
            (segment, kind_of(segment.codec).codec([segment], made_for))
            for segment in plan.segments
        ]

    def of(self, message: Tensor) -> Iterator[tuple[Segment, Codec[Any], Tensor]]:
        """Every segment, its codec, and its words of ``message`` ``[n, words]``."""
        words = message.split([codec.words for _, codec in self._parts], dim=1)
        for (segment, codec), own in zip(self._parts, words, strict=True):
            yield segment, codec, own
