"""Uncompressed elements in messages, and the stamps after them.

A unit's columns without a codec travel beside those with one. An operator here takes all such
pieces of a message at once, because on a GPU small pieces take as long as their launches. The same
launch writes or compares stamps; see :mod:`tagc.collect.lockstep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

STAMP_WORDS = 2


class Piece(NamedTuple):
    """Adjacent columns, and where they are in a message.

    Attributes:
        word: the first word, a multiple of 4.
    """

    column: int
    numel: int
    word: int


@dataclass(frozen=True)
class DenseLayout:
    """The pieces of a message that are sent in the dtype ``wire``: the elements' own, or bfloat16.

    Attributes:
        tail: the word of the stamp; 0 if there is none.
    """

    wire: torch.dtype
    pieces: tuple[Piece, ...]
    tail: int = 0

    def moved(self, columns: int, words: int) -> DenseLayout:
        """The layout in wider rows and messages, in which this one begins at these places."""
        pieces = (Piece(p.column + columns, p.numel, p.word + words) for p in self.pieces)
        return replace(self, pieces=tuple(pieces), tail=self.tail and self.tail + words)

    def joined(self, other: DenseLayout) -> DenseLayout:
        """The pieces of both, and the stamp of the one that has one."""
        return replace(self, pieces=self.pieces + other.pieces, tail=self.tail or other.tail)

    def elements(self, message: Tensor, piece: Piece) -> Tensor:
        """A view ``[..., numel]`` of the wire's dtype on ``[..., words]`` int32."""
        first = piece.word * 4 // self.wire.itemsize
        return message.view(self.wire)[..., first : first + piece.numel]

    def stamps(self, message: Tensor) -> Tensor:
        """The stamps ``[..., 2]`` of messages ``[..., words]``."""
        return message[..., self.tail : self.tail + STAMP_WORDS]


def put_dense(x: Tensor, message: Tensor, stamp: Tensor | None, *, layout: DenseLayout) -> None:
    """Write pieces to messages. Half a word that is left after 16-bit elements becomes 0.

    Args:
        x: ``[D, columns]``. In bfloat16, a NaN becomes the NaN with the bits 0x7fc0.
        message: ``[D, words]`` int32, written.
        stamp: ``[2]`` int32; the second one is counted up, and both are written to the tail of
            all messages.
    """
    for piece in layout.pieces:
        elements = layout.elements(message, piece)
        if elements.shape[-1] * layout.wire.itemsize % 4:
            message[:, piece.word + piece.numel * layout.wire.itemsize // 4] = 0
        some = x[:, piece.column : piece.column + piece.numel]
        if layout.wire != x.dtype:
            rounded = some.to(layout.wire)  # which NaN it makes depends on the place
            some = rounded.masked_fill_(rounded.isnan(), torch.nan)
        elements.copy_(some)
    if stamp is not None:
        stamp[1:].add_(1)
        layout.stamps(message).copy_(stamp.expand(len(message), -1))


def sum_dense(
    message: Tensor,
    out: Tensor,
    stamp: Tensor | None,
    wrong: Tensor | None,
    *,
    layout: DenseLayout,
    divisor: int,
) -> None:
    """Sum pieces in the order of the ranks, in float32 (float64 if they are float64), divided
    by ``divisor`` and rounded to the dtype of ``out``. A single message that is not divided is
    only rounded, and then its finite elements stay finite in float16: bfloat16 rounds the
    largest numbers up, beyond its range.

    Args:
        message: ``[K, R, words]`` int32.
        out: ``[K, columns]``, written. All columns become NaN if any stamp differs or, without
            ``stamp``, if ``wrong`` is true.
        stamp: ``[2]`` int32, what all messages' stamps should be; only with one row ``K``.
        wrong: boolean ``[1]``, given with ``stamp``: becomes true if any stamp differs.
    """
    for piece in layout.pieces:
        columns = out[:, piece.column : piece.column + piece.numel]
        parts = layout.elements(message, piece).unbind(1)
        if len(parts) == 1 and divisor == 1:
            columns.copy_(_finite_in(out.dtype, parts[0]))
        else:
            _average(parts, columns, divisor)
    spoil(is_spoilt(message, stamp, wrong, layout), out)


def is_spoilt(
    message: Tensor, stamp: Tensor | None, wrong: Tensor | None, layout: DenseLayout
) -> Tensor | None:
    """Whether rows become NaN, see :func:`sum_dense`. Sets the flag if stamps differ."""
    if stamp is None:
        return wrong
    assert wrong is not None
    differ = (layout.stamps(message) != stamp).any()
    wrong.logical_or_(differ)
    return differ


def spoil(spoilt: Tensor | None, out: Tensor) -> None:
    """NaN everywhere if ``spoilt`` is true."""
    # A host can look first; a GPU would be waited for.
    if spoilt is not None and (spoilt.device.type != "cpu" or spoilt):
        out.masked_fill_(spoilt, torch.nan)


def _finite_in(dtype: torch.dtype, elements: Tensor) -> Tensor:
    if dtype != torch.float16 or elements.dtype == torch.float16:
        return elements
    end, wide = torch.finfo(dtype).max, elements.float()
    return torch.where(wide.isfinite(), wide.clamp(-end, end), wide)


def _average(parts: Sequence[Tensor], out: Tensor, divisor: int) -> None:
    first, *others = parts
    total = first.to(torch.float64 if first.dtype == torch.float64 else torch.float32, copy=True)
    for some in others:
        total += some
    # By a tensor: by a number, a GPU multiplies by the inverse, which rounds twice.
    torch.div(total, torch.full_like(total[:1, :1], divisor), out=out)
