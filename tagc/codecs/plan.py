"""The contracts of codecs: plans, which have the sizes of a unit's segments, and kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch

from tagc.codecs.config import CodecConfig
from tagc.codecs.feedback import FeedbackRule
from tagc.ops.program import Launch, Place


def aligned(words: int) -> int:
    """The next multiple of 4 words, which is 16 bytes. See :mod:`tagc.plan.unit_plan`."""
    return -(-words // 4) * 4


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Adjacent columns of a segment, cut into one slice per owner. The last slices may be shorter,
    or empty.

    Attributes:
        columns: columns of all slices together.
        length: columns of a slice.
    """

    columns: int
    length: int


@dataclass(frozen=True, kw_only=True)
class CodecPlan:
    """A codec with its sizes filled in, for one segment.

    Attributes:
        warmup_steps: how many of the first reductions are dense.
        feedback: the feedback rule; None if nothing is stored.
        of_changes: whether messages carry changes since the last message, and ranks that decode
            them keep a copy to add them to.
        reuses_forward_message: whether the backward reuses the messages of the forward's
            all-gather.
        density: fraction of elements that a rank sends.
        compressed: whether the segment is sent in another form than the buffer itself.
    """

    exact: ClassVar[bool] = False
    """Whether ranks that decode have the bits that were encoded."""

    warmup_steps: int = 0
    feedback: FeedbackRule | None = None
    of_changes: bool = False
    reuses_forward_message: bool = False
    density: float = 1.0
    compressed: bool = True

    @property
    def name(self) -> str:
        """The codec's name in texts for users."""
        raise NotImplementedError

    @property
    def words(self) -> int:
        """int32 words of the message to one destination."""
        raise NotImplementedError

    @property
    def room(self) -> int:
        """The segment's words in a message, and up to 3 words of padding."""
        return aligned(self.words)

    @property
    def nominal_bits(self) -> float | None:
        """Nominal bits per element, without scales; None if the codec has no such number."""
        return None

    @property
    def overshoot(self) -> float:
        """How much a sum may exceed the exact sum of gradients, relative to the largest magnitudes
        that ranks add up. Codes that round up, in this message and in the one whose residual it
        carries, and rounded scales cause it."""
        return 2**-8

    @property
    def cells(self) -> int:
        """int32 words per destination that are summed on the way, besides the message. The owner
        decodes the one sum instead of every rank's words."""
        return 0

    @property
    def measured_words(self) -> int:
        """int32 words that a measurement of the next message writes. By the first of them, ranks
        agree on its size (:meth:`fitting`). 0 if all messages have the same size."""
        return 0

    def measuring(self, x: Place, old: Place, measured: Place) -> Iterator[Launch]:
        """Launches that measure the next message about ``x`` ``[1, columns]``.

        Args:
            old: the copy of ``x``, with a codec of changes.
            measured: ``[1, measured_words]`` int32, written.
        """
        return iter(())

    def fitting(self, measured: int) -> Self:
        """The plan for the next message, by the largest number that a rank measured."""
        return self

    @property
    def largest(self) -> Self:
        """The plan for the longest messages that can occur."""
        return self

    def cut(self, owners: int) -> tuple[Self, tuple[Cut, ...]] | None:
        """The plan of one of ``owners`` equal slices of the segment, and the cuts of its columns;
        None if the codec needs the segment whole."""
        return None

    def resized(self, columns: int) -> Self:
        """The plan of a segment of about as many columns, to be timed."""
        raise NotImplementedError

    def encoding(
        self, x: Place, message: Place, residual: Place | None = None, seeds: Place | None = None
    ) -> Iterator[Launch]:
        """Launches that write a message ``[n, words]`` for every row of ``x`` ``[n, columns]``.

        Args:
            residual: ``[n, columns]``, added to ``x``; what the messages leave out replaces it.
            seeds: ``[n]``, if codes are rounded by chance.
        """
        raise NotImplementedError

    def decoding(self, messages: Place, rows: Place) -> Iterator[Launch]:
        """Launches that decode every message ``[n, words]`` to its own row ``[n, columns]``;
        changes are added to it."""
        raise NotImplementedError

    def summing(self, messages: Place, rows: Place, divisor: int) -> Iterator[Launch]:
        """Launches that write sums of messages over ``W`` ranks, divided by ``divisor``: of
        ``[W, words]`` to ``[1, columns]``, or of ``[W, n, words]`` to ``[n, columns]``."""
        raise NotImplementedError

    def finding_unfit(self, messages: Place, dtype: torch.dtype, flag: Place) -> Iterator[Launch]:
        """Launches that set ``flag`` ``[]`` if messages were made from values that the codec cannot
        carry: not finite, or at the edge of their ``dtype``; none if it carries all values."""
        return iter(())

    def used_words(self, columns: int) -> int:
        """Words that an owner needs if its shard fills only the first ``columns`` columns of the
        segment (in FSDP1's flat buffer). The others need not be sent."""
        return self.words if columns else 0

    def word_shares(self, columns: Sequence[float]) -> list[float]:
        """The share of the words that each of the segment's parameters takes.

        Args:
            columns: each parameter's columns.
        """
        total = sum(columns) or 1
        return [c / total for c in columns]


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The input of a codec's plan.

    Attributes:
        columns: elements per destination.
        world_size: ranks whose contributions are summed.
        dtype: dtype of the buffer that contains the segment.
        feedback: the feedback rule; None if nothing is stored.
        spans: elements of every parameter in a shard.
        matrices: for every parameter, the rows and columns of the matrices in its shard; empty
            unless the codec needs them.
        replicated: whether all ranks hold the same parameters, so that no rank owns a part.
    """

    columns: int
    world_size: int
    dtype: torch.dtype
    replicated: bool = False
    feedback: FeedbackRule | None = None
    spans: Sequence[int] = ()
    matrices: Sequence[Sequence[tuple[int, int]]] = ()


SegmentOf = TypeVar("SegmentOf")


class Span(NamedTuple, Generic[SegmentOf]):
    """A segment, its columns of a row, and its words in a message."""

    segment: SegmentOf
    columns: slice
    words: slice


@dataclass(frozen=True)
class CodecKind:
    """One kind of codec.

    Attributes:
        name: the name in policies.
        plan: the class of a segment's plan.
        make_plan: makes a plan from either configuration.
        config: the configuration for gradients; None if it cannot send gradients.
        parameter_config: the configuration for parameters; None if it cannot send parameters.
    """

    name: str
    plan: type[CodecPlan] | UnionType
    make_plan: Callable[[Any, PlanRequest], CodecPlan]
    config: type[CodecConfig] | None = None
    parameter_config: type[CodecConfig] | None = None
