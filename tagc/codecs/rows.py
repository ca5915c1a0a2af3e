"""A coder without state: a tensor's elements in rows of one length, every row a message by itself.

Activations come in shapes that change from step to step, so nothing is planned for a shape: every
tensor is cut into rows of ``8 * block`` elements, and the last one is filled up with zeros. A row's
message is a multiple of 16 bytes, and its codes depend on its elements alone (stochastic rounding,
too, is seeded by them), so that activations which a backward computes once more travel with the
same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tagc.ops import Ops
from tagc.ops.blocks import BlockLayout
from tagc.ops.launches import seeds_of

_BLOCKS = 8
"""Blocks of a row: an even number of scales, and codes of a multiple of 16 bytes."""
_NOT_DIVIDED = 1


class RowCoder:
    """Codes rows in blocks, as :mod:`tagc.ops.blocks` has it.

    Attributes:
        elements: elements of a row.
        words: int32 words of its message.
    """

    def __init__(self, ops: Ops, *, bits: int, block: int, dithered: bool = False) -> None:
        self._ops, self._dithered = ops, dithered
        self._layout = BlockLayout(numel=_BLOCKS * block, bits=bits, block=block)
        self.elements, self.words = self._layout.numel, self._layout.words

    def rows(self, numel: int) -> int:
        """Rows of ``numel`` elements."""
        return -(-numel // self.elements)

    def cut(self, t: Tensor, rows: int) -> Tensor:
        """The elements of each of ``t`` ``[n, numel]`` in ``rows`` rows: ``[n * rows, elements]``,
        a view if they fill them."""
        missing = rows * self.elements - t.shape[-1]
        return (pad(t, (0, missing)) if missing else t).reshape(-1, self.elements)

    def room(self, t: Tensor, rows: int) -> Tensor:
        """Rows to decode ``t`` ``[n, numel]`` into: a view of ``t`` if its elements fill them."""
        if rows * self.elements == t.shape[-1] and t.is_contiguous():
            return t.view(-1, self.elements)
        return t.new_empty(t.shape[0] * rows, self.elements)

    def encode(self, rows: Tensor) -> Tensor:
        """The messages ``[n, words]`` int32 of ``rows`` ``[n, elements]``."""
        messages = torch.empty(len(rows), self.words, dtype=torch.int32, device=rows.device)
        seeds = seeds_of(rows.float()) if self._dithered else None
        self._ops.quantize(rows, None, messages, layout=self._layout, average=0.0, dither=seeds)
        return messages

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """Write the elements of messages ``[n, words]`` to ``out`` ``[n, elements]``."""
        self.add_up(messages[None], out, _NOT_DIVIDED)

    def add_up(self, messages: Tensor, out: Tensor, divisor: int) -> None:
        """Write the sum over ranks, divided by ``divisor``, to ``out`` ``[n, elements]``. It is
        added in float32, in the order of the ranks.

        Args:
            messages: ``[W, n, words]`` int32.
        """
        self._ops.dequantize(messages.transpose(0, 1), out, layout=self._layout, divisor=divisor)
