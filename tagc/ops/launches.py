"""The operators that programs launch: those of :class:`tagc.ops.Ops`, and a few of torch's own.

Each is a dataclass. Its fields are the options, and its docstring names the tensors in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tagc.ops.blocks import BlockLayout
from tagc.ops.fingerprint import fingerprint
from tagc.ops.implementations import Ops
from tagc.ops.matrix import MatrixLayout
from tagc.ops.program import Operator, Place


@dataclass(frozen=True)
class Quantize(Operator):
    """``(x, residual or None, message)``, with ``dithered`` also ``seeds``. See
    :meth:`tagc.ops.blocks.BlockOps.quantize`."""

    layout: BlockLayout
    average: float = 0.0
    dithered: bool = False

    def bound(self, ops: Ops) -> Callable[..., object]:
        quantize = partial(ops.quantize, layout=self.layout, average=self.average)
        if not self.dithered:
            return quantize
        return lambda x, residual, message, seeds: quantize(x, residual, message, dither=seeds)

    def prepare(self, ops: Ops, *places: Place | None) -> None:
        x, residual, *_ = (place and place.dtype for place in places)
        assert x is not None
        ops.prepare_blocks(self.layout, x, residual, self.average, dithered=self.dithered)


@dataclass(frozen=True)
class QuantizeMatrix(Operator):
    """``(x, residual or None, message)``. See :meth:`tagc.ops.matrix.MatrixOps.quantize_matrix`."""

    layout: MatrixLayout
    average: float = 0.0

    def bound(self, ops: Ops) -> Callable[..., object]:
        return partial(ops.quantize_matrix, layout=self.layout, average=self.average)

    def prepare(self, ops: Ops, *places: Place | None) -> None:
        x, residual, _ = (place and place.dtype for place in places)
        assert x is not None
        ops.prepare_matrix(self.layout, x, residual, self.average)


@dataclass(frozen=True, kw_only=True)
class _Decodes(Operator):
    """``(messages [n, words], rows [n, columns])``: decodes each message to its own row.

    Attributes:
        add: whether decoded values are added to the rows.
    """

    add: bool = False

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        return tensor[:, None] if argument == 0 else tensor  # each row is the sum of one message


@dataclass(frozen=True, kw_only=True)
class Dequantize(_Decodes):
    """See :class:`_Decodes` and :meth:`tagc.ops.blocks.BlockOps.dequantize`."""

    layout: BlockLayout

    def bound(self, ops: Ops) -> Callable[..., object]:
        return partial(ops.dequantize, layout=self.layout, divisor=1, add=self.add)

    def prepare(self, ops: Ops, *places: Place | None) -> None:
        _, rows = places
        assert rows is not None
        ops.prepare_blocks(self.layout, rows.dtype, None, 0.0)


@dataclass(frozen=True, kw_only=True)
class DequantizeMatrix(_Decodes):
    """See :class:`_Decodes` and :meth:`tagc.ops.matrix.MatrixOps.dequantize_matrix`."""

    layout: MatrixLayout

    def bound(self, ops: Ops) -> Callable[..., object]:
        return partial(ops.dequantize_matrix, layout=self.layout, divisor=1, add=self.add)

    def prepare(self, ops: Ops, *places: Place | None) -> None:
        _, rows = places
        assert rows is not None
        ops.prepare_matrix(self.layout, rows.dtype, None, 0.0)


@dataclass(frozen=True)
class ScalesAbove(Operator):
    """``(messages [n, words], flag [] bool)``: whether any scale of the messages is larger than the
    one with the bits ``largest``. (A NaN's bits are larger, and scales have no sign.)"""

    layout: BlockLayout
    largest: int

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        words = self.layout.scale_words
        return tensor[:, :words].view(torch.int16) if argument == 0 else tensor

    def run(self, scales: Tensor, flag: Tensor) -> None:
        torch.any(scales > self.largest, out=flag)


@dataclass(frozen=True)
class Put(Operator):
    """``(rows [n, numel], message [n, words])``: writes elements in the dtype ``wire``."""

    numel: int
    wire: torch.dtype

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        return tensor if argument == 0 or self._leaves_half else _elements(tensor, self)

    def run(self, rows: Tensor, message: Tensor) -> None:
        if self._leaves_half:
            message[:, -1:].zero_()
            message = _elements(message, self)
        message.copy_(rows)

    @property
    def _leaves_half(self) -> bool:
        """Whether elements of 2 bytes leave half of the last word."""
        return self.numel * self.wire.itemsize % 4 > 0


@dataclass(frozen=True)
class Get(Operator):
    """``(messages [n, words], rows [n, numel])``: reads elements of the dtype ``wire``. Finite
    elements stay finite in float16: bfloat16 rounds the largest numbers up, beyond its range."""

    numel: int
    wire: torch.dtype

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        return _elements(tensor, self) if argument == 0 else tensor

    def run(self, elements: Tensor, rows: Tensor) -> None:
        if rows.dtype == torch.float16 and self.wire != torch.float16:
            end = torch.finfo(torch.float16).max
            wide = elements.float()
            elements = torch.where(wide.isfinite(), wide.clamp(-end, end), wide)
        rows.copy_(elements)


def _elements(words: Tensor, sent: Put | Get) -> Tensor:
    """A view ``[n, numel]`` of the wire's dtype on ``[n, words]`` int32."""
    return words.view(sent.wire)[..., : sent.numel]


@dataclass(frozen=True)
class Clamp(Operator):
    """``(x)``: numbers beyond ``largest`` become ``largest``; NaN stays."""

    largest: float

    def run(self, x: Tensor) -> None:
        x.clamp_(-self.largest, self.largest)


@dataclass(frozen=True)
class Copy(Operator):
    """``(source, target)``, which may differ in dtype."""

    def run(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)


@dataclass(frozen=True)
class Subtract(Operator):
    """``(new, old, difference)``, in the difference's dtype."""

    def run(self, new: Tensor, old: Tensor, difference: Tensor) -> None:
        difference.copy_(new).sub_(old)


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
class Fingerprint(Operator):
    """``(x [1, n], print [2] int64)``. See :func:`tagc.ops.fingerprint.fingerprint`."""

    def run(self, x: Tensor, print_: Tensor) -> None:
        print_.copy_(fingerprint(x[0]))


@dataclass(frozen=True)
class Differ(Operator):
    """``(a, b, flag [] bool)``: whether any element differs."""

    def run(self, a: Tensor, b: Tensor, flag: Tensor) -> None:
        torch.any(a != b, out=flag)


def seeds_of(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Seeds from the rows' content: sums of the bits of ``rows`` ``[n, columns]`` float32, modulo
    2**32, ``[n]`` int32. Nearly every change of a row changes its seed."""
    # In int32: for int64 sums torch would first make a copy in int64.
    return torch.sum(rows.contiguous().view(torch.int32), -1, dtype=torch.int32, out=out)
