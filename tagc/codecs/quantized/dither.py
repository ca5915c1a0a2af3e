"""Seeds of the dither, so that what ranks round away has nothing in common, and repeats."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.codecs.codec import CodecSetup
from tagc.ops.reference.hashing import MASK, fmix32
from tagc.ops.symbols import wrap_int32

_GOLDEN, _STRIDE = 0x9E3779B9, 0x7F4A7C15


class Dither:
    """Of one segment. Seeds depend on the unit, the segment, and either the rank that encodes, the
    row and the step, or the elements: a run that goes on repeats what it would have done.
    """

    def __init__(self, setup: CodecSetup, column: int) -> None:
        """Seeds for the segment that begins at ``column`` of its unit."""
        self._of_segment = (setup.seed * _GOLDEN + column * _STRIDE) & MASK
        self._rows = torch.arange(setup.destinations, device=setup.device, dtype=torch.int64)
        self._sources = setup.world_size

    def seeds(self, source: int, step: int) -> Tensor:
        """``[D]`` int32, for the ``source``-th of the ranks that encode."""
        turn = (step * self._sources + source) * len(self._rows)
        return self._mixed(self._rows + turn)

    def seeds_of(self, rows: Tensor) -> Tensor:
        """``[D]`` int32 from the bits of ``rows`` ``[D, columns]`` float32: others whenever
        anything in them changed, and the same for the same rows, with nothing to be counted."""
        return self._mixed(rows.contiguous().view(torch.int32).sum(-1, dtype=torch.int64))

    def _mixed(self, numbers: Tensor) -> Tensor:
        """One seed for each int64."""
        upper = fmix32((numbers >> 32) & MASK)
        return wrap_int32(fmix32(fmix32((numbers ^ upper) & MASK) ^ self._of_segment))
