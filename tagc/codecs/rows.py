"""Coders without state: tensors of any size as messages.

Activations come in shapes that change from step to step, so nothing is planned for a shape, and
messages depend on the elements alone (stochastic rounding, too, is seeded by them), so that
activations which a backward computes once more travel with the same bits.

A coder has two lengths for the message about ``numel`` elements: the shorter one, and the room that
every message fits in. For all coders but :class:`ExponentCoder` both are the same.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from tagc.ops import Ops
from tagc.ops.blocks import BlockLayout
from tagc.ops.exponents import BLOCK, ExponentLayout
from tagc.ops.torch_operators import seeds_of

_BLOCKS = 8
"""Blocks of a row: an even number of scales, and codes of a multiple of 16 bytes."""
_NOT_DIVIDED = 1


class Coder:
    """A coder.

    Attributes:
        dtypes: of the tensors that it codes.
        varies: whether a message may be longer than usual, which only its sender knows.
        total_dtype: of sums that are coded again.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]]
    varies: ClassVar[bool] = False
    total_dtype: ClassVar[torch.dtype]

    def lengths(self, numel: int) -> tuple[int, int]:
        """int32 words of the message about ``numel`` elements: usually, and at most."""
        raise NotImplementedError

    def is_long(self, message: Tensor) -> Tensor:
        """Whether a message is longer than usual, ``[1]`` bool.

        Args:
            message: flat, int32 or bytes.
        """
        return torch.zeros(1, dtype=torch.bool, device=message.device)

    def part(self, numel: int, ranks: int) -> int:
        """Elements of each of ``ranks`` equal parts of ``numel``, the last one padded."""
        raise NotImplementedError

    def encode(self, t: Tensor) -> Tensor:
        """The messages ``[n, words]`` int32 about the rows of ``t`` ``[n, numel]``."""
        raise NotImplementedError

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """Write what messages ``[n, words]`` say to ``out`` ``[n, numel]``."""
        raise NotImplementedError

    def add_up(self, messages: Tensor, out: Tensor, divisor: int) -> None:
        """Write the sum over ranks, divided by ``divisor``, to ``out`` ``[numel]``. It is added in
        float32, in the order of the ranks, and rounded once.

        Args:
            messages: ``[W, words]`` int32.
        """
        raise NotImplementedError

    def total(self, messages: Tensor, numel: int, divisor: int) -> Tensor:
        """:meth:`add_up` of ``[numel]`` elements, for a message to all ranks."""
        out = torch.empty(numel, dtype=self.total_dtype, device=messages.device)
        self.add_up(messages, out, divisor)
        return out


class RowCoder(Coder):
    """Cuts a tensor into rows of 8 blocks, the last one filled up with zeros. Each row is quantized
    by itself, as :mod:`tagc.ops.blocks` has it."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    total_dtype = torch.float32

    def __init__(self, ops: Ops, *, bits: int, block: int, dithered: bool = False) -> None:
        self._ops, self._dithered = ops, dithered
        self._layout = BlockLayout(numel=_BLOCKS * block, bits=bits, block=block)

    def _rows(self, numel: int) -> int:
        return -(-numel // self._layout.numel)

    def lengths(self, numel: int) -> tuple[int, int]:
        words = self._rows(numel) * self._layout.words
        return words, words

    def part(self, numel: int, ranks: int) -> int:
        return -(-self._rows(numel) // ranks) * self._layout.numel

    def encode(self, t: Tensor) -> Tensor:
        missing = self._rows(t.shape[-1]) * self._layout.numel - t.shape[-1]
        rows = (pad(t, (0, missing)) if missing else t).reshape(-1, self._layout.numel)
        messages = torch.empty(len(rows), self._layout.words, dtype=torch.int32, device=t.device)
        seeds = seeds_of(rows.float()) if self._dithered else None
        self._ops.quantize(rows, None, messages, layout=self._layout, average=0.0, dither=seeds)
        return messages.view(len(t), -1)

    def decode(self, messages: Tensor, out: Tensor) -> None:
        self._add_up(messages.view(1, -1, self._layout.words), out, _NOT_DIVIDED)

    def add_up(self, messages: Tensor, out: Tensor, divisor: int) -> None:
        parts = messages.view(len(messages), -1, self._layout.words)
        self._add_up(parts, out.view(1, -1), divisor)

    def _add_up(self, messages: Tensor, out: Tensor, divisor: int) -> None:
        """See :meth:`add_up`, for messages about rows ``[W, rows, words]``."""
        n, numel = out.shape
        room = out
        if numel % self._layout.numel or not out.is_contiguous():
            room = out.new_empty(n, self._rows(numel) * self._layout.numel)
        rows = room.view(-1, self._layout.numel)
        self._ops.dequantize(messages.transpose(0, 1), rows, layout=self._layout, divisor=divisor)
        if room is not out:
            out.copy_(room[:, :numel])


class ExponentCoder(Coder):
    """Packs the exponents of bfloat16, as :mod:`tagc.ops.exponents` has it: no bit is lost. Rows
    whose exponents do not fit travel as they are, in longer messages."""

    dtypes = (torch.bfloat16,)
    varies = True
    total_dtype = torch.bfloat16

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def lengths(self, numel: int) -> tuple[int, int]:
        layout = ExponentLayout(numel=numel)
        return layout.words, layout.raw_words

    def is_long(self, message: Tensor) -> Tensor:
        return message[:1] != 0

    def part(self, numel: int, ranks: int) -> int:
        return -(-numel // (ranks * BLOCK)) * BLOCK

    def encode(self, t: Tensor) -> Tensor:
        layout = ExponentLayout(numel=t.shape[-1])
        messages = torch.empty(len(t), layout.raw_words, dtype=torch.int32, device=t.device)
        self._ops.pack_exponents(t, messages, layout=layout)
        return messages

    def decode(self, messages: Tensor, out: Tensor) -> None:
        layout = ExponentLayout(numel=out.shape[-1])
        self._ops.unpack_exponents(messages, out, layout=layout)

    def add_up(self, messages: Tensor, out: Tensor, divisor: int) -> None:
        parts = out.new_empty(len(messages), len(out))
        self.decode(messages, parts)
        sums = parts[0].float()
        for part in parts[1:]:
            sums += part
        if divisor != _NOT_DIVIDED:
            # Not by a number: a GPU would multiply by its inverse, and round twice.
            sums = sums / torch.full_like(sums[:1], divisor)
        out.copy_(sums)
