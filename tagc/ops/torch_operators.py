"""The operators of programs that torch itself does, alike on all devices.

Each is a dataclass. Its fields are the options, and its docstring names the tensors in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tagc.ops.blocks import BlockLayout
from tagc.ops.program import Operator


@dataclass(frozen=True)
class Clamp(Operator):
    """``(x)``: numbers beyond ``largest`` become ``largest``; NaN stays."""

    largest: float

    def run(self, x: Tensor) -> None:
        x.clamp_(-self.largest, self.largest)


# A tensor of the host's, which a kernel on a GPU takes as a number.
_NAN = torch.tensor(torch.nan, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Copy(Operator):
    """``(source, target)``, which may differ in dtype, or be one tensor. With a third tensor,
    ``flag [1] bool``, the target's first column, or all of it, becomes NaN if the flag is set."""

    def run(self, source: Tensor, target: Tensor, flag: Tensor | None = None) -> None:
        if flag is not None and flag.device.type != "cpu":
            copy_or_spoil(source, target, flag)
            return
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
        if flag is not None:
            target[:, :1].masked_fill_(flag, torch.nan)


def copy_or_spoil(source: Tensor, target: Tensor, flag: Tensor) -> None:
    """:class:`Copy` in one kernel. On a CPU this takes 2.5 times as long as a copy."""
    torch.where(flag, _NAN, source.to(target.dtype), out=target)


@dataclass(frozen=True)
class Subtract(Operator):
    """``(new, old, difference)``, in the difference's dtype."""

    def run(self, new: Tensor, old: Tensor, difference: Tensor) -> None:
        if difference.device.type == "cpu":
            difference.copy_(new).sub_(old)
        else:
            subtract_at_once(new, old, difference)


def subtract_at_once(new: Tensor, old: Tensor, difference: Tensor) -> None:
    """:class:`Subtract` in one kernel. A subtraction would compute in the dtype of ``new`` and
    ``old``. On a CPU this takes copies in the other dtype, and ten times as long for bfloat16."""
    torch.addcmul(new, old, _minus_one(difference.dtype, difference.device), out=difference)


@cache
def _minus_one(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1,), -1, dtype=dtype, device=device)


@dataclass(frozen=True)
class ClearUnchanged(Operator):
    """``(new, old, difference)``: the difference is 0 where both are equal, infinities too."""

    def run(self, new: Tensor, old: Tensor, difference: Tensor) -> None:
        difference.masked_fill_(new == old, 0.0)


@dataclass(frozen=True)
class SeedsOf(Operator):
    """``(rows [n, columns] float32, seeds [n] int32)``. See :func:`seeds_of`."""

    def run(self, rows: Tensor, seeds: Tensor) -> None:
        seeds_of(rows, seeds)


@dataclass(frozen=True)
class Spoil(Operator):
    """``(x, flag [1] bool)``: every element becomes ``value`` if the flag is set."""

    value: float = torch.nan

    def run(self, x: Tensor, flag: Tensor) -> None:
        x.masked_fill_(flag, self.value)


@dataclass(frozen=True)
class Fill(Operator):
    """``(x)``: every element becomes ``value``."""

    value: float

    def run(self, x: Tensor) -> None:
        x.fill_(self.value)


@dataclass(frozen=True)
class Set(Operator):
    """``(x)`` of as many elements as ``values``."""

    values: tuple[float, ...]

    def run(self, x: Tensor) -> None:
        x.copy_(torch.tensor(self.values, dtype=x.dtype, device="cpu").view_as(x))


@dataclass(frozen=True)
class Advance(Operator):
    """``(x)`` int32: adds ``by``. Sums wrap around."""

    by: int

    def run(self, x: Tensor) -> None:
        x.add_(self.by)


@dataclass(frozen=True)
class Divide(Operator):
    """``(x)``: divides by ``divisor``."""

    divisor: int

    def run(self, x: Tensor) -> None:
        x.div_(self.divisor)


@dataclass(frozen=True)
class Saturate(Operator):
    """``(wide, out)``: rounds float32 to the dtype of ``out``. Values beyond its range by no more
    than the factor ``reach`` become its largest number."""

    reach: float

    def run(self, wide: Tensor, out: Tensor) -> None:
        largest = torch.finfo(out.dtype).max
        near = wide.abs() <= self.reach * largest
        out.copy_(torch.where(near, wide.clamp(-largest, largest), wide))


Runs = tuple[slice, ...]


@dataclass(frozen=True)
class Expand(Operator):
    """``(part [n, c], whole [n, S])``: writes the columns of ``part`` to ``runs``, zeros
    elsewhere."""

    runs: Runs

    def run(self, part: Tensor, whole: Tensor) -> None:
        whole.zero_()
        at = 0
        for run in self.runs:
            width = run.stop - run.start
            whole[:, run] = part[:, at : at + width]
            at += width


@dataclass(frozen=True)
class Pick(Operator):
    """``(whole [n, S], part [n, c])``: the columns ``runs``, one after another."""

    runs: Runs

    def run(self, whole: Tensor, part: Tensor) -> None:
        torch.cat([whole[:, run] for run in self.runs], 1, out=part)


@dataclass(frozen=True)
class Mark(Operator):
    """``(x [1, S])``: 1 in the columns ``runs``, 0 elsewhere."""

    runs: Runs

    def run(self, x: Tensor) -> None:
        x.zero_()
        for run in self.runs:
            x[:, run] = 1


@dataclass(frozen=True)
class PutBack(Operator):
    """``(mask, before, x)``: ``x`` becomes ``before`` where the mask is not 0."""

    def run(self, mask: Tensor, before: Tensor, x: Tensor) -> None:
        # No boolean indexing: it would wait for the device.
        x.copy_(torch.where(mask != 0, before, x))


@dataclass(frozen=True)
class Pieces(Operator):
    """``(x, y)``: copies pieces of ``x``, and writes zeros to others of ``y``. In a piece, the
    elements ``first`` to ``stop`` of the flat tensor on one side are a block on the other.

    Attributes:
        pieces: first, stop, and the rows and columns of the block.
        empty: rows and columns of ``y``.
        back: whether ``x`` has the blocks, and ``y`` is flat.
    """

    pieces: tuple[tuple[int, int, slice, slice], ...]
    empty: tuple[tuple[slice, slice], ...] = ()
    back: bool = False

    def run(self, x: Tensor, y: Tensor) -> None:
        for rows, columns in self.empty:
            y[rows, columns].zero_()
        if not self.pieces:
            return
        flat, blocks = (y, x) if self.back else (x, y)
        flat, pairs = flat.view(-1), []
        for first, stop, rows, columns in self.pieces:
            block = blocks[rows, columns]
            pairs.append((flat[first:stop].view(block.shape), block))
        of, to = zip(*pairs, strict=True)
        if self.back:
            of, to = to, of
        torch._foreach_copy_(list(to), list(of))  # one kernel on a GPU, instead of one per piece


@dataclass(frozen=True)
class ByNeighbour(Operator):
    """``(encoded [n * W, words], send [W, n, words])``: messages in the order of rows to messages
    in the order of ranks."""

    def run(self, encoded: Tensor, send: Tensor) -> None:
        ranks, rows, _ = send.shape
        send.copy_(encoded.view(rows, ranks, -1).transpose(0, 1))


def seeds_of(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Seeds from the rows' content: sums of the bits of ``rows`` ``[n, columns]`` float32, modulo
    2**32, ``[n]`` int32. Nearly every change of a row changes its seed."""
    # In int32: for int64 sums torch would first make a copy in int64.
    return torch.sum(rows.contiguous().view(torch.int32), -1, dtype=torch.int32, out=out)


@dataclass(frozen=True)
class ScalesAbove(Operator):
    """``(messages [n, words], flag [1] bool)``: sets the flag if any scale of the messages is
    larger than the one with the bits ``largest``. (A NaN's bits are larger, and scales have no
    sign.)"""

    layout: BlockLayout
    largest: int

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        words = self.layout.scale_words
        return tensor[:, :words].view(torch.int16) if argument == 0 else tensor

    def run(self, scales: Tensor, flag: Tensor) -> None:
        flag.logical_or_((scales > self.largest).any())
