"""The ``delta`` codec: what changed in parameters since the last message.

Whoever decodes has a copy of the parameters as of then, the owner of a shard too, and adds what a
message says. What quantization leaves out is still missing in the copy, so the next change has it:
error feedback without a residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

import torch
from torch import Tensor

from tagc.codecs.codec import Codec, CodecSegment, CodecSetup, P
from tagc.codecs.delta.plan import DeltaPlan
from tagc.codecs.matrix.codec import MatrixCodec
from tagc.codecs.matrix.plan import MatrixPlan
from tagc.codecs.quantized.codec import QuantizedCodec
from tagc.codecs.quantized.plan import QuantizedPlan


@dataclass(frozen=True)
class _Coded(Generic[P]):
    """The same columns, with the code of their changes."""

    start: int
    stop: int
    codec: P


class DeltaCodec(Codec[DeltaPlan]):
    """Segments of which changes travel. Its rows are these changes, in float32: the copy, and
    subtracting it, is :class:`tagc.comm.HostCopy`'s matter."""

    def __init__(self, segments: Sequence[CodecSegment[DeltaPlan]], setup: CodecSetup) -> None:
        super().__init__(segments, setup)
        wide = replace(setup, dtype=torch.float32)
        self._codes = [_code(segment, wide) for segment in segments]

    def encode_rows(self, rows: Tensor, message: Tensor) -> None:
        """See :meth:`Codec.encode_rows`."""
        for part, code in zip(self.parts, self._codes, strict=True):
            code.encode_rows(rows, message[:, part.words])

    def decode_rows(self, received: Tensor, rows: Tensor) -> None:
        """See :meth:`Codec.decode_rows`."""
        for part, code in zip(self.parts, self._codes, strict=True):
            code.decode_rows(received[:, part.words], rows)


def _code(
    segment: CodecSegment[DeltaPlan], setup: CodecSetup
) -> Codec[QuantizedPlan] | Codec[MatrixPlan]:
    plan = segment.codec.code
    if isinstance(plan, MatrixPlan):
        return MatrixCodec([_Coded(segment.start, segment.stop, plan)], setup)
    return QuantizedCodec([_Coded(segment.start, segment.stop, plan)], setup)
