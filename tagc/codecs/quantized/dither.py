"""Seeds of the dither, so that what ranks round away has nothing in common, and repeats.

Operators hash a seed once more, so seeds need to differ, and no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tagc.codecs.codec import STAGES, CodecSetup
from tagc.ops.hashing import MASK, fmix32
from tagc.ops.symbols import wrap_int32

_GOLDEN, _STRIDE = 0x9E3779B9, 0x7F4A7C15


class Dither:
    """Of some segments of a unit. Seeds depend on the unit, the segment, the rank that encodes, the
    stage, the row and the step, and on nothing else: a run that goes on repeats what it would have
    done.
    """

    def __init__(self, setup: CodecSetup, columns: Sequence[int]) -> None:
        """Seeds for segments that begin at these columns of their unit."""
        self._places = {column: i for i, column in enumerate(columns)}
        starts = torch.tensor([*columns], dtype=torch.int64, device=setup.device)
        rows = torch.arange(setup.destinations, dtype=torch.int64, device=setup.device)
        # Each is hashed before the next comes in, so that no sum of them is another's.
        mixed = fmix32((starts * _STRIDE + setup.seed * _GOLDEN) & MASK)
        mixed = fmix32((mixed ^ (STAGES * setup.rank + setup.stage)) & MASK)
        self._first = wrap_int32(fmix32(mixed[:, None] ^ rows))
        self._step: int | None = None
        self._seeds = torch.empty_like(self._first)

    def seeds(self, column: int, step: int) -> Tensor:
        """``[D]`` int32."""
        if self._step != step:
            # One small kernel a unit. That sums wrap around is meant.
            turn = step * _GOLDEN & MASK
            torch.add(self._first, turn - (turn >> 31 << 32), out=self._seeds)
            self._step = step
        return self._seeds[self._places[column]]


def seeds_of(rows: Tensor) -> Tensor:
    """``[D]`` int32: sums of the bits of ``rows`` ``[D, columns]`` float32, modulo 2**32; others
    for nearly every change, and the same for the same rows, with nothing to be counted."""
    # In int32, as torch would make a copy in int64 first.
    return rows.contiguous().view(torch.int32).sum(-1, dtype=torch.int32)
