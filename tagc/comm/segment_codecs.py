"""The codecs of what a unit gathers, one for every segment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tagc.codecs import Codec, CodecSetup, kind_of, split_message
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
        # Words without padding in between, as few spans as there can be.
        self._written: list[slice] = []
        start = at = 0
        for segment in plan.segments:
            codec = segment.codec
            if codec.words < codec.room or segment is plan.segments[-1]:
                self._written.append(slice(start, at + codec.words))
                start = at + codec.room
            at += codec.room

    def of(self, message: Tensor) -> Iterator[tuple[Segment, Codec[Any], Tensor]]:
        """Every segment, its codec, and its words of ``message`` ``[n, words]``."""
        words = split_message(message, [codec for _, codec in self._parts])
        for (segment, _), (codec, own) in zip(self._parts, words, strict=True):
            yield segment, codec, own

    def differ(self, message: Tensor, other: Tensor) -> Tensor:
        """Whether two messages ``[words]`` say anything else, whatever their padding holds;
        boolean, ``[]``."""
        spans = [(message[span] != other[span]).any() for span in self._written]
        return spans[0] if len(spans) == 1 else torch.stack(spans).any()
