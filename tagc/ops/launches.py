"""The operators that programs launch: those of :class:`tagc.ops.Ops`, and a few of torch's own.

Each is a dataclass. Its fields are the options, and its docstring names the tensors in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from tagc.ops.blocks import BlockLayout
from tagc.ops.dense import DenseLayout
from tagc.ops.exact import ExactLayout
from tagc.ops.exponents import ExponentLayout
from tagc.ops.implementations import Ops
from tagc.ops.matrix import AnyMatrices
from tagc.ops.program import Launch, Operator, Place, Step


@dataclass(frozen=True)
class OfOps(Operator):
    """An operator of :class:`tagc.ops.Ops`, whose docstring :mod:`tagc.ops.reference` has.

    Attributes:
        name: its name there.
        options: its arguments that are no tensors.
    """

    launches: ClassVar[bool] = True
    name: ClassVar[str]

    @property
    def options(self) -> dict[str, Any]:
        return vars(self)

    def bound(self, ops: Ops, own: int) -> Callable[..., object]:
        return partial(getattr(ops, self.name), **self.options)


@dataclass(frozen=True)
class Quantize(OfOps):
    """``(x, residual or None, message)``, and ``seeds`` to round by chance."""

    name: ClassVar[str] = "quantize"

    layout: BlockLayout
    average: float = 0.0


@dataclass(frozen=True)
class QuantizeMatrix(OfOps):
    """``(x, residual or None, message)``."""

    name: ClassVar[str] = "quantize_matrix"

    layout: AnyMatrices
    average: float = 0.0


@dataclass(frozen=True)
class QuantizeAndPut(OfOps):
    """``(x, residual or None, message)`` as of ``quantize``, seeds or None, and the tensors of
    :class:`Put`; also ``sums, before`` of :class:`Fingerprint`, if it is taken of the rows."""

    name: ClassVar[str] = "quantize_and_put"

    quantize: Quantize | QuantizeMatrix
    dense: DenseLayout

    @property
    def options(self) -> dict[str, Any]:
        return {**self.quantize.options, "dense": self.dense}


@dataclass(frozen=True, kw_only=True)
class _Reads(OfOps):
    """``(messages, rows [n, columns])``: reads each of ``messages`` ``[n, words]`` to its own row;
    or with a ``divisor`` sums: of ``messages`` ``[W, words]`` to one row, or of ``[W, n, words]``
    to ``n`` rows.

    Attributes:
        divisor: divides sums; None for no sums.
    """

    divisor: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {**vars(self), "divisor": self.divisor or 1}

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        """Messages as ``[n, W, words]``."""
        if argument:
            return tensor
        if self.divisor is None:
            return tensor[:, None]  # each row is the sum of one message
        return tensor[None] if tensor.dim() == 2 else tensor.transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class Dequantize(_Reads):
    """See :class:`_Reads`.

    Attributes:
        add: whether decoded values are added to the rows.
    """

    name: ClassVar[str] = "dequantize"

    layout: BlockLayout
    add: bool = False


@dataclass(frozen=True, kw_only=True)
class DequantizeMatrix(_Reads):
    """See :class:`Dequantize`."""

    name: ClassVar[str] = "dequantize_matrix"

    layout: AnyMatrices
    add: bool = False


@dataclass(frozen=True)
class DequantizeAndSum(OfOps):
    """``(messages, rows)`` as of ``dequantize``, and the tensors of :class:`Sum`; also ``sent`` and
    ``out`` of :class:`UndoLag`, if it follows."""

    name: ClassVar[str] = "dequantize_and_sum"

    dequantize: Dequantize | DequantizeMatrix
    dense: DenseLayout
    lead: float = 1.0

    @property
    def options(self) -> dict[str, Any]:
        return {**self.dequantize.options, "dense": self.dense, "lead": self.lead}

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        if argument < 4:  # messages and rows, of the codes and of the pieces
            return self.dequantize.adapted(argument % 2, tensor)
        return tensor if argument < 6 else tensor[0]  # of a lag, there is one row


@dataclass(frozen=True)
class MeasureExact(OfOps):
    """``(new, old, plan)``."""

    name: ClassVar[str] = "measure_exact"

    layout: ExactLayout


@dataclass(frozen=True)
class EncodeExact(OfOps):
    """``(new, old, plan, message)``."""

    name: ClassVar[str] = "encode_exact"

    layout: ExactLayout


@dataclass(frozen=True)
class DecodeExact(OfOps):
    """``(messages, rows)``."""

    name: ClassVar[str] = "decode_exact"

    layout: ExactLayout


@dataclass(frozen=True)
class PackExponents(OfOps):
    """``(rows, message)``."""

    name: ClassVar[str] = "pack_exponents"

    layout: ExponentLayout


@dataclass(frozen=True)
class UnpackExponents(OfOps):
    """``(messages, rows)``."""

    name: ClassVar[str] = "unpack_exponents"

    layout: ExponentLayout


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


@dataclass(frozen=True)
class Put(OfOps):
    """``(x [D, columns], message [D, words], stamp or None)``: uncompressed pieces."""

    name: ClassVar[str] = "put_dense"

    layout: DenseLayout


@dataclass(frozen=True, kw_only=True)
class Sum(_Reads):
    """``(messages, rows, stamp or None, flag or None)``: uncompressed pieces. See
    :class:`_Reads`."""

    name: ClassVar[str] = "sum_dense"

    layout: DenseLayout


def together(rows: Place, steps: Iterable[Step]) -> list[Step]:
    """The steps, and last one :class:`Put` or :class:`Sum` for all that are about these ``rows``
    and the same messages, in the same dtype. It is merged with a launch of codes before it."""
    others: list[Step] = []
    found: dict[Any, Launch] = {}
    for step in steps:
        if not isinstance(step, Launch) or not isinstance(step.operator, Put | Sum):
            others.append(step)
            continue
        operator, (first, second, *flags) = step.operator, step.places
        assert first is not None
        assert second is not None
        x, message = (first, second) if isinstance(operator, Put) else (second, first)
        if x.whole_rows != rows.whole_rows:
            others.append(step)
            continue
        places = first.whole_rows, second.whole_rows
        layout = operator.layout.moved(x.first_column, message.first_column)
        key = replace(operator, layout=DenseLayout(layout.wire, ())), places
        before = found.pop(key, None)
        if before is not None:
            assert isinstance(before.operator, Put | Sum)
            layout = before.operator.layout.joined(layout)
        columns = (f"{p.column}:{p.column + p.numel}" for p in layout.pieces)
        of = " ".join((step.of.partition(" ")[0], ", ".join(columns)))
        found[key] = Launch(replace(operator, layout=layout), (*places, *flags), of)
    for launch in found.values():
        lag = others.pop() if others and _undoes_lag(others[-1]) else None
        merged = _merged(others[-1], launch, lag) if others else None
        if merged is not None:
            others[-1] = merged
        else:
            others += [step for step in (lag, launch) if step is not None]
    return others


def _undoes_lag(step: Step) -> bool:
    return isinstance(step, Launch) and isinstance(step.operator, UndoLag)


def _merged(step: Step, dense: Launch, lag: Step | None) -> Launch | None:
    """One launch instead of all; None if they are not about codes and pieces of the same messages.

    Args:
        lag: undoes the lag of what ``step`` decodes.
    """
    if not isinstance(step, Launch):
        return None
    operator, pieces, of = step.operator, dense.operator, f"{step.of}, {dense.of}"
    if isinstance(operator, Quantize | QuantizeMatrix) and isinstance(pieces, Put):
        x, residual, message, *seeds = step.places
        if message is None or message.whole_rows != dense.places[1]:
            return None
        both = QuantizeAndPut(operator, pieces.layout)
        return Launch(both, (x, residual, message, *(seeds or [None]), *dense.places), of)
    if isinstance(operator, Dequantize | DequantizeMatrix) and isinstance(pieces, Sum):
        message = step.places[0]
        if message is None or message.whole_rows != dense.places[0]:
            return None
        if operator.divisor != pieces.divisor:
            return None
        if not isinstance(lag, Launch):
            both = DequantizeAndSum(operator, pieces.layout)
            return Launch(both, (*step.places, *dense.places), of)
        if isinstance(operator, DequantizeMatrix) and isinstance(lag.operator, UndoLag):
            both = DequantizeAndSum(operator, pieces.layout, lag.operator.lead)
            return Launch(both, (*step.places, *dense.places, *lag.places[1:]), of)
    return None


def with_fingerprint(steps: list[Step], note: Launch) -> list[Step]:
    """The steps, and last ``note``, which takes a fingerprint. It is merged with a launch before it
    about the same rows."""
    last = steps[-1] if steps else None
    if isinstance(last, Launch) and isinstance(last.operator, QuantizeAndPut):
        rows = last.places[4]
        if rows == note.places[0]:
            return [*steps[:-1], replace(last, places=(*last.places, *note.places[1:]))]
    return [*steps, note]


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
class Fingerprint(OfOps):
    """``(x [1, n], sums [3] int64, before [2] int64)``, and ``changed`` to compare."""

    name: ClassVar[str] = "fingerprint"

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        return tensor[0] if argument == 0 else tensor


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
class UndoLag(OfOps):
    """``(decoded [1, n], sent [1, n], out [1, n])``."""

    name: ClassVar[str] = "undo_lag"

    lead: float

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        return tensor[0]


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
class ByRank(Operator):
    """The tensors of the operators in ``ranks``, of which every rank runs its own."""

    ranks: tuple[Operator, ...]

    def bound(self, ops: Ops, own: int) -> Callable[..., object]:
        return self.ranks[own].bound(ops, own)


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
