"""Storage of what a rank did not send."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tagc.codecs.feedback.rule import stored_layout
from tagc.ops import Ops
from tagc.ops.blocks import BlockLayout


class Residual:
    """The residual of a segment, with a row for every destination.

    In 8 bits it is stored as the ``quantized`` codec would send it, with a scale for every 256
    elements, and converted to float32 for each step. Rounding errors, up to 1/254 of the largest
    element of a block, are lost.
    """

    def __init__(
        self, rows: int, columns: int, dtype: torch.dtype, ops: Ops, device: torch.device
    ) -> None:
        self._ops, self._columns = ops, columns
        self._layout: BlockLayout | None = None
        width = columns
        if dtype == torch.int8:
            self._layout = stored_layout(columns)
            width = self._layout.words
            ops.prepare_blocks(self._layout, torch.float32, None, 0.0)
        stored = dtype if self._layout is None else torch.int32
        self._stored = torch.zeros(rows, width, dtype=stored, device=device)

    def read(self, rows: slice = slice(None)) -> Tensor:
        """``[rows, columns]`` in the dtype that operators work in; a copy if the stored dtype is
        another one."""
        stored = self._stored[rows]
        if self._layout is None:
            return stored
        wide = torch.empty(len(stored), self._columns, dtype=torch.float32, device=stored.device)
        self._ops.dequantize(stored[:, None], wide, layout=self._layout, divisor=1)
        return wide

    @contextmanager
    def opened(self, rows: slice = slice(None)) -> Iterator[Tensor]:
        """Like :meth:`read`, but to change in place; changes are stored at the end."""
        wide = self.read(rows)
        yield wide
        if self._layout is not None:
            self._ops.quantize(wide, None, self._stored[rows], layout=self._layout, average=0.0)

    def zero_(self) -> None:
        """Set the residual to zero. (In 8 bits, too, all bits zero means zero.)"""
        self._stored.zero_()


@contextmanager
def opened(residual: Residual | None, rows: slice) -> Iterator[Tensor | None]:
    """See :meth:`Residual.opened`; None if there is no residual."""
    if residual is None:
        yield None
    else:
        with residual.opened(rows) as wide:
            yield wide
