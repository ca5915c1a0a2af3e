"""The contract of a codec: how segments of a unit travel.

A policy's configuration becomes a plan for one segment, and the plans of a unit's segments of one
kind a :class:`Codec`, which has their state.
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
"""Of a step, in which a rank encodes; see :class:`CodecSetup`."""


@dataclass(frozen=True, kw_only=True)
class CodecSetup:
    """What a codec is made for.

    Attributes:
        destinations: rows ``D`` of the buffer that a rank encodes.
        world_size: ranks ``W`` that encode.
        dtype: of the buffer.
        seed: of hashes; units differ in it, so that equal layouts do not share bad luck.
        rank: of all processes, and ``stage`` of a step (0 gradients, 1 across replicas, 2 what
            their owners hand out, 3 inside hosts): what is rounded by chance differs in both.
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


@dataclass(frozen=True)
class Part(Generic[P]):
    """One segment in its codec.

    Attributes:
        columns: of the unit.
        words: of the codec's words in a message.
    """

    columns: slice
    words: slice
    plan: P
    feedback: SegmentFeedback


@dataclass(frozen=True, kw_only=True)
class SelectionCount:
    """What a codec that selects did with one segment so far.

    Attributes:
        target: density that the policy asks for.
        elements: of one destination, padding included.
        selected: elements sent, to all destinations.
        union: elements of this rank's own shard that any rank sent; None where that is not known.
        unresolved: groups of it that could not be decoded.
    """

    target: float
    elements: int
    selected: int
    union: int | None = None
    unresolved: int = 0


class Codec(Generic[P]):
    """The segments of one kind of codec in one unit, and their state between steps.

    A rank encodes ``[D, S]`` gradients to ``D`` messages, and decodes its row from those of ``W``
    ranks. Subclasses implement :meth:`encode` and :meth:`decode`, and what else they have.

    Attributes:
        words: int32 words that these segments take in a message, padding included.
        parts: the segments, in the order of the columns and of the words.
    """

    def __init__(self, segments: Sequence[CodecSegment[P]], setup: CodecSetup) -> None:
        self.words = 0
        self.parts: list[Part[P]] = []
        self._setup, self._ops = setup, setup.ops
        for segment in segments:
            plan = segment.codec
            words = slice(self.words, self.words + plan.words)
            feedback = SegmentFeedback(
                plan.feedback,
                destinations=setup.destinations,
                columns=segment.stop - segment.start,
                overshoot=plan.overshoot,
                ops=setup.ops,
                device=setup.device,
            )
            self.parts.append(Part(slice(segment.start, segment.stop), words, plan, feedback))
            self.words += plan.room

    @property
    def feedbacks(self) -> dict[int, SegmentFeedback]:
        """By first column of the segment in the unit."""
        return {part.columns.start: part.feedback for part in self.parts}

    @property
    def controllers(self) -> tuple[ThresholdController, ...]:
        """What follows the size of gradients; nothing where nothing is selected."""
        return ()

    def encode(self, grad: Tensor, message: Tensor, exchange: Exchange) -> None:
        """Write this rank's messages.

        Args:
            grad: ``[D, S]`` of the unit.
            message: ``[D, words]`` int32, written.
        """
        raise NotImplementedError

    def start(self, exchange: Exchange) -> None:
        """Start what else has to be exchanged, besides the messages."""

    def wait(self) -> None:
        """Wait for the collectives that :meth:`start` began, as far as decoding needs them."""

    def decode(self, received: Tensor, out: Tensor, exchange: Exchange, divisor: int) -> None:
        """Write the sum over ranks, divided by ``divisor``, to the columns of ``out`` ``[S]``.

        Args:
            received: ``[W, words]`` int32, message ``r`` from rank ``r``.
        """
        raise NotImplementedError

    def encode_rows(self, rows: Tensor, message: Tensor) -> None:
        """Write a message for every row of ``rows`` ``[R, S]`` to ``message`` ``[R, words]``
        int32, without an exchange; only codecs that parameters can have, or that can be cut into
        slices (:meth:`CodecPlan.cut`)."""
        raise NotImplementedError

    def decode_rows(self, received: Tensor, rows: Tensor) -> None:
        """Write every message to the columns of its own row: an all-gather adds nothing up. Only
        codecs that parameters can have, or that can be cut into slices.

        Args:
            received: ``[W, words]`` int32.
            rows: ``[W, S]``.
        """
        raise NotImplementedError

    def decode_sums(self, received: Tensor, rows: Tensor) -> None:
        """Write sums of messages to the columns of ``rows``, each over all ranks. Only codecs that
        ranks of a host add up in.

        Args:
            received: ``[K, W, words]`` int32, message ``[k, r]`` from rank ``r``.
            rows: ``[K, S]``.
        """
        raise NotImplementedError

    def cannot_carry(self, received: Tensor) -> Tensor | None:
        """Whether any of the messages ``[W, words]`` int32 is about values that this codec loses,
        not finite or at the edge of their dtype; boolean, ``[]``. None if it carries all."""
        return None

    def skip(self, steps: int) -> None:
        """Go on as if so many encodings had been made elsewhere."""

    def selection_counts(self) -> list[SelectionCount]:
        """What was selected so far, by segment; waits for the device. Nothing where everything
        is sent."""
        return []

    def state(self) -> dict[str, Tensor]:
        """What the next step and the counters depend on, beside the feedback: live tensors or
        new ones, after waiting for what is in flight. The names and shapes never change."""
        return {}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values (names, shapes and dtypes being right) that the next step
        could not work with."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken, given that it passes the check."""
