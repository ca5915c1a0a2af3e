"""Sizes of codec ``matrix``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Self

from tagc.codecs.matrix.config import MatrixConfig
from tagc.codecs.plan import CodecPlan, Cut, PlanRequest
from tagc.ops.matrix import MatrixLayout


@dataclass(frozen=True, kw_only=True)
class MatrixPlan(CodecPlan):
    """How the matrices of one segment are quantized, one after the other.

    Attributes:
        layouts: of the parameters' parts of a shard, one after the other.
        matrices_of_parameters: how many each parameter has.
    """

    layouts: tuple[MatrixLayout, ...]
    matrices_of_parameters: tuple[int, ...]

    @property
    def name(self) -> str:
        """With bits or group, and level."""
        first = self.layouts[0]
        level = f" level {first.level:g}" if first.level != 1 else ""
        size = f"1 of {first.group}" if first.group > 1 else f"int{first.bits}"
        return f"matrix {size}{level}"

    @property
    def nominal_bits(self) -> float:
        """Of a code, for each of the elements that share it."""
        return self.layouts[0].width / self.layouts[0].group

    @property
    def overshoot(self) -> float:
        """See :attr:`CodecPlan.overshoot`: codes have no zero, and stand for values that may be
        twice the element that they are sent for."""
        return 1.0

    def scratch_bytes(self, destinations: int, sources: int, *, reference: bool) -> int:
        """See :meth:`CodecPlan.scratch_bytes`: the reference's of one matrix; else what is kept for
        runs of matrices, each size of its own."""
        if reference:
            # A row is summed as a table, of which a narrow matrix fills little.
            table = max(m.rows * max(0, m.places * m.word_lanes - m.codes) for m in self.layouts)
            each = max(56 * destinations, 28 * sources) * max(m.numel for m in self.layouts)
            return each + 7 * destinations * table
        # Sums and scales of columns where a message is made; as it is read, scales of rows, and of
        # as many columns as its words have places for.
        return sum(
            m.count
            * (
                destinations * (7 * m.columns + 8)
                + sources * (4 * m.rows + 2 * m.row_words * m.places * m.group)
            )
            for m in {m for m, _, _ in self.runs}
        )

    def cut(self, owners: int) -> tuple[Self, tuple[Cut, ...]]:
        """See :meth:`CodecPlan.cut`: between the rows of every matrix, so that each owner's slice
        has scales of columns of its own."""
        layouts = tuple(replace(m, rows=-(-m.rows // owners)) for m in self.layouts)
        pairs = zip(self.layouts, layouts, strict=True)
        cuts = tuple(Cut(columns=whole.numel, length=part.numel) for whole, part in pairs)
        return replace(self, layouts=layouts), cuts

    @property
    def words(self) -> int:
        """Scales and codes of all of them."""
        return sum(layout.words for layout in self.layouts)

    @cached_property
    def runs(self) -> tuple[tuple[MatrixLayout, slice, slice], ...]:
        """Neighbours of one shape together, which share an operator's launches; each run with its
        columns of the segment and its words of the message."""
        found, column, word = [], 0, 0
        for one, alike in groupby(self.layouts):
            layout = replace(one, count=len(list(alike)))
            columns = slice(column, column + layout.numel)
            words = slice(word, word + layout.words)
            found.append((layout, columns, words))
            column, word = columns.stop, words.stop
        return tuple(found)

    def word_shares(self, columns: Sequence[float]) -> list[float]:
        """Every matrix has a message of its own, with scales."""
        words = (layout.words for layout in self.layouts)
        return [sum(islice(words, n)) / self.words for n in self.matrices_of_parameters]


def plan_matrix(config: MatrixConfig, request: PlanRequest) -> MatrixPlan:
    """The sizes of one segment's matrices."""
    return MatrixPlan(
        layouts=tuple(
            MatrixLayout(
                rows=rows, columns=n, bits=config.bits, group=config.group, level=config.level
            )
            for matrices in request.matrices
            for rows, n in matrices
        ),
        matrices_of_parameters=tuple(map(len, request.matrices)),
        warmup_steps=config.warmup_steps,
        feedback=request.feedback,
    )
