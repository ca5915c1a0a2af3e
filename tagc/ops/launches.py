"""The operators of programs that launch those of :class:`tagc.ops.Ops`, and how several of them
become one launch.

Each is a dataclass. Its fields are the options, and its docstring names the tensors in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

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
class Fingerprint(OfOps):
    """``(x [1, n], sums [3] int64, before [2] int64)``, and ``changed`` to compare."""

    name: ClassVar[str] = "fingerprint"

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        return tensor[0] if argument == 0 else tensor


@dataclass(frozen=True)
class UndoLag(OfOps):
    """``(decoded [1, n], sent [1, n], out [1, n])``."""

    name: ClassVar[str] = "undo_lag"

    lead: float

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        return tensor[0]


@dataclass(frozen=True)
class ByRank(Operator):
    """The tensors of the operators in ``ranks``, of which every rank runs its own."""

    ranks: tuple[Operator, ...]

    def bound(self, ops: Ops, own: int) -> Callable[..., object]:
        return self.ranks[own].bound(ops, own)
