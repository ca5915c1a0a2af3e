"""Seeds of the dither, so that what ranks round away has nothing in common, and repeats.

Operators hash a seed once more, so seeds need to differ, and no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tagc.codecs.codec import CodecSetup
from tagc.ops.reference.hashing import MASK, fmix32
from tagc.ops.symbols import wrap_int32

_GOLDEN, _STRIDE = 0x9E3779B9, 0x7F4A7C15


class Dither:
    """Of some segments of a unit. Seeds depend on the unit, the segment, the rank that encodes, the
    row and the step, and on nothing else: a run that goes on repeats what it would have done.
    """

    def __init__(self, setup: CodecSetup, columns: Sequence[int]) -> None:
        """Seeds for segments that begin at these columns of their unit."""
        self._setup = setup
        self._places = {column: i for i, column in enumerate(columns)}
        self._first: dict[int, Tensor] = {}
        self._now: tuple[int, int] | None = None
        self._seeds = torch.empty(0, dtype=torch.int32)

    def seeds(self, column: int, source: int, step: int) -> Tensor:
        """``[D]`` int32, for the ``source``-th of the ranks that encode."""
        if self._now != (source, step):
            # One small kernel a unit. That sums wrap around is meant.
            turn = step * _GOLDEN & MASK
            self._seeds = self._of(source) + (turn - (turn >> 31 << 32))
            self._now = source, step
        return self._seeds[self._places[column]]

    def _of(self, source: int) -> Tensor:
        """In the first step, ``[segments, D]`` int32."""
        if source not in self._first:
            s = self._setup
            columns = torch.tensor([*self._places], dtype=torch.int64, device=s.device)
            rows = torch.arange(s.destinations, dtype=torch.int64, device=s.device)
            mixed = fmix32((columns * _STRIDE + s.seed * _GOLDEN) & MASK)
            rows = rows + source * s.destinations
            self._first[source] = wrap_int32(fmix32(mixed[:, None] ^ fmix32(rows)))
        return self._first[source]


def seeds_of(rows: Tensor) -> Tensor:
    """``[D]`` int32 from the bits of ``rows`` ``[D, columns]`` float32: others whenever anything in
    them changed, and the same for the same rows, with nothing to be counted."""
    total = rows.contiguous().view(torch.int32).sum(-1, dtype=torch.int64)
    # The upper half, too: opposite signs differ in nothing else.
    halves = total[:, None].view(torch.int32)
    return halves[:, 0] ^ halves[:, 1]
