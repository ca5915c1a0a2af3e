"""The contract of a codec: how it encodes and decodes segments of a unit.

A policy's configuration becomes a plan for one segment. The plans of a unit's segments of one kind
become a :class:`Codec`, which keeps their state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tagc.codecs.exchange import Exchange
from tagc.codecs.feedback import SegmentFeedback
from tagc.codecs.plan import CodecPlan
from tagc.codecs.selection.threshold import ThresholdController
from tagc.codecs.workspace import Workspace
from tagc.ops import Ops

P = TypeVar("P", bound=CodecPlan)
PlanOf = TypeVar("PlanOf", bound=CodecPlan, covariant=True)


class CodecSegment(Protocol[PlanOf]):
    """Columns ``start`` to ``stop`` of a unit."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def codec(self) -> PlanOf: ...


STAGES = 4
"""How many stages of a step encode; see :class:`CodecSetup`."""


@dataclass(frozen=True, kw_only=True)
class CodecSetup:
    """The constructor arguments of codecs.

    Attributes:
        destinations: rows ``D`` of the buffer that a rank encodes.
        world_size: ranks ``W`` that encode.
        dtype: the buffer's dtype.
        seed: seed of hashes. Units have different seeds, so that equal layouts do not share
            collisions.
        rank: this process's rank among all; stochastic rounding differs by rank and ``stage``.
        stage: 0 gradients, 1 across replicas, 2 the sums of slices' owners, 3 inside hosts.
        first_word: where the codec's words begin in a message.
    """

    destinations: int
    world_size: int
    dtype: torch.dtype
    ops: Ops
    device: torch.device
    workspace: Workspace
    seed: int = 0
    rank: int = 0
    stage: int = 0
    first_word: int = 0


@dataclass(frozen=True)
class Part(Generic[P]):
    """One segment in its codec.

    Attributes:
        columns: its columns of the unit.
        words: its words in a message.
    """

    columns: slice
    words: slice
    plan: P
    feedback: SegmentFeedback


@dataclass(frozen=True, kw_only=True)
class SelectionCount:
    """Counts of a codec that selects, for one segment so far.

    Attributes:
        target: the density that the policy asks for.
        elements: elements for one destination, including padding.
        selected: elements sent to all destinations.
        union: elements of this rank's own shard that at least one rank sent; None if unknown.
        unresolved: groups of the own shard that could not be decoded.
    """

    target: float
    elements: int
    selected: int
    union: int | None = None
    unresolved: int = 0


class Codec(Generic[P]):
    """The segments of one kind of codec in one unit, and their state between steps.

    A rank encodes ``[D, S]`` gradients to ``D`` messages, and decodes its row from the messages of
    ``W`` ranks. Messages are whole; a codec reads and writes the words of its parts only.
    Subclasses implement :meth:`encode`, :meth:`decode`, and other methods as needed.

    Attributes:
        stop: where these segments' words end in a message, including padding.
        parts: the segments, in the order of the columns and of the words.
    """

    def __init__(self, segments: Sequence[CodecSegment[P]], setup: CodecSetup) -> None:
        self.stop = setup.first_word
        self.parts: list[Part[P]] = []
        self._setup, self._ops = setup, setup.ops
        for segment in segments:
            plan = segment.codec
            words = slice(self.stop, self.stop + plan.words)
            feedback = SegmentFeedback(
                plan.feedback,
                destinations=setup.destinations,
                columns=segment.stop - segment.start,
                overshoot=plan.overshoot,
                ops=setup.ops,
                device=setup.device,
            )
            self.parts.append(Part(slice(segment.start, segment.stop), words, plan, feedback))
            self.stop += plan.room

    @property
    def feedbacks(self) -> dict[int, SegmentFeedback]:
        """The feedbacks, by the segment's first column in the unit."""
        return {part.columns.start: part.feedback for part in self.parts}

    @property
    def controllers(self) -> tuple[ThresholdController, ...]:
        """Threshold controllers, which follow the size of gradients; empty if the codec does not
        select."""
        return ()

    def encode(self, grad: Tensor, message: Tensor, exchange: Exchange) -> None:
        """Write this rank's messages.

        Args:
            grad: the unit's gradients, ``[D, S]``.
            message: ``[D, words]`` int32; the words of its parts are written.
        """
        raise NotImplementedError

    def start(self, exchange: Exchange) -> None:
        """Start the codec's exchanges besides messages."""

    def wait(self) -> None:
        """Wait for the exchanges of :meth:`start` that decoding needs."""

    def decode(self, received: Tensor, out: Tensor, exchange: Exchange, divisor: int) -> None:
        """Write the sum over ranks, divided by ``divisor``, to the columns of ``out`` ``[S]``.

        Args:
            received: ``[W, words]`` int32, message ``r`` from rank ``r``.
        """
        raise NotImplementedError

    def encode_rows(self, rows: Tensor, message: Tensor) -> None:
        """Write a message for every row of ``rows`` ``[R, S]`` to ``message`` ``[R, words]``
        int32, without an exchange. Only for codecs that can be cut into slices
        (:meth:`CodecPlan.cut`), or that are used inside hosts."""
        raise NotImplementedError

    def decode_rows(self, received: Tensor, rows: Tensor) -> None:
        """Decode every message to the columns of its own row, without a sum. Only for codecs that
        can be cut into slices.

        Args:
            received: ``[W, words]`` int32.
            rows: ``[W, S]``.
        """
        raise NotImplementedError

    def decode_sums(self, received: Tensor, rows: Tensor) -> None:
        """Write sums of messages, each over all ranks, to the columns of ``rows``. Only for codecs
        that are used inside hosts.

        Args:
            received: ``[K, W, words]`` int32, message ``[k, r]`` from rank ``r``.
            rows: ``[K, S]``.
        """
        raise NotImplementedError

    def skip(self, steps: int) -> None:
        """Continue as if this codec had already encoded ``steps`` times."""

    def selection_counts(self) -> list[SelectionCount]:
        """Counts of selected elements so far, by segment; empty if the codec does not select.
        Waits for the device."""
        return []

    def state(self) -> dict[str, Tensor]:
        """All state except the feedback's: live tensors or copies. Waits for work in flight. Names
        and shapes never change."""
        return {}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never returns. Names, shapes and dtypes
        must be right."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a :meth:`state` that passes :meth:`check_state`."""
