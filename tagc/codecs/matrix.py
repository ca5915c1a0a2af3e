"""Codec ``matrix``: every element in a few bits, with scales of rows and columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from tagc.codecs.config import CodecConfig, Steps, unit
from tagc.codecs.plan import CodecPlan, Cut, PlanRequest
from tagc.ops.launches import DequantizeMatrix, QuantizeMatrix
from tagc.ops.matrix import Matrices, MatrixLayout
from tagc.ops.program import Launch, Place


class MatrixConfig(CodecConfig):
    """Every element of a matrix in `bits`, with a scale for each row and each column.

    The scales follow the gradient of the step, which is a sum of outer products. After division by
    them, elements are closer to Gaussian, and a few bits go a long way. `level` multiplies the
    values that codes stand for: above 1, a message carries more of the gradient and the residual,
    and more noise. `warmup_steps` is as for the codec `sketch`.
    """

    feedback_kinds: ClassVar[tuple[str, ...]] = ("residual", "average", "none")

    kind: Literal["matrix"] = "matrix"
    """The codec's name."""
    bits: Annotated[Literal[1, 2], unit("bits per code")] = 1
    """Size of a code."""
    level: Annotated[float, Field(ge=0.5, le=2, allow_inf_nan=False), unit("factor")] = 1.0
    """Factor on the values that codes stand for."""
    warmup_steps: Steps = 0
    """How many of the first reductions are dense; a unit uses the longest warm-up of its rules."""

    @property
    def needs_matrices(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class MatrixPlan(CodecPlan):
    """How the matrices of one segment are quantized, one after the other.

    Attributes:
        layouts: the layouts of the matrices in a shard, parameter by parameter.
        matrices_of_parameters: how many matrices each parameter has.
    """

    layouts: tuple[MatrixLayout, ...]
    matrices_of_parameters: tuple[int, ...]

    @property
    def name(self) -> str:
        first, changes = self.layouts[0], "delta " if self.of_changes else ""
        level = f" level {first.level:g}" if first.level != 1 else ""
        return f"{changes}matrix int{first.bits}{level}"

    @property
    def nominal_bits(self) -> int:
        return self.layouts[0].bits

    @property
    def overshoot(self) -> float:
        """See :attr:`CodecPlan.overshoot`: there is no code for zero, and a code's value may be
        twice the element."""
        return 1.0

    def cut(self, owners: int) -> tuple[Self, tuple[Cut, ...]]:
        """See :meth:`CodecPlan.cut`: between the rows of every matrix, so each owner's slice has
        its own scales of columns."""
        layouts = tuple(replace(m, rows=-(-m.rows // owners)) for m in self.layouts)
        pairs = zip(self.layouts, layouts, strict=True)
        cuts = tuple(Cut(columns=whole.numel, length=part.numel) for whole, part in pairs)
        return replace(self, layouts=layouts), cuts

    @property
    def words(self) -> int:
        return self.matrices.words

    @cached_property
    def matrices(self) -> Matrices:
        """All of them; adjacent ones with the same layout are a run."""
        alike = groupby(self.layouts)
        return Matrices(tuple(replace(one, count=len(list(some))) for one, some in alike))

    def resized(self, columns: int) -> Self:
        """See :meth:`CodecPlan.resized`: one roughly square matrix."""
        width = 1 << (columns.bit_length() // 2)
        layout = replace(self.layouts[0], rows=columns // width, columns=width)
        return replace(self, layouts=(layout,), matrices_of_parameters=(1,))

    def encoding(
        self, x: Place, message: Place, residual: Place | None = None, seeds: Place | None = None
    ) -> Iterator[Launch]:
        average = 0.0 if self.feedback is None or residual is None else self.feedback.old_share
        yield Launch(QuantizeMatrix(self.matrices, average), (x, residual, message), self.name)

    def summing(self, messages: Place, rows: Place, divisor: int) -> Iterator[Launch]:
        operator = DequantizeMatrix(layout=self.matrices, divisor=divisor)
        yield Launch(operator, (messages, rows), self.name)

    def decoding(self, messages: Place, rows: Place) -> Iterator[Launch]:
        operator = DequantizeMatrix(layout=self.matrices, add=self.of_changes)
        yield Launch(operator, (messages, rows), self.name)

    def word_shares(self, columns: Sequence[float]) -> list[float]:
        """See :meth:`CodecPlan.word_shares`: every matrix has its own codes and scales."""
        words = (layout.words for layout in self.layouts)
        return [sum(islice(words, n)) / self.words for n in self.matrices_of_parameters]


def plan_matrix(config: MatrixConfig, request: PlanRequest) -> MatrixPlan:
    """The sizes of one segment's matrices."""
    return MatrixPlan(
        layouts=tuple(
            MatrixLayout(rows=rows, columns=n, bits=config.bits, level=config.level)
            for matrices in request.matrices
            for rows, n in matrices
        ),
        matrices_of_parameters=tuple(map(len, request.matrices)),
        warmup_steps=config.warmup_steps,
        feedback=request.feedback,
    )
