"""What the plans of all codecs have in common: what one segment of a unit sends and stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from tagc.codecs.feedback import ErrorFeedback, FeedbackRule


def aligned(words: int) -> int:
    """The next multiple of 4 words, which is 16 bytes. See :mod:`tagc.codecs.coder`."""
    return -(-words // 4) * 4


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Neighbouring columns of a segment, cut into equal slices, one for every owner: the last
    slices may be shorter, or empty.

    Attributes:
        columns: of all slices together.
        length: columns of a slice.
    """

    columns: int
    length: int


@dataclass(frozen=True, kw_only=True)
class CodecPlan:
    """A codec with its sizes filled in, for one segment.

    Attributes:
        warmup_steps: reductions that go dense first.
        feedback: None where nothing is stored.
    """

    warmup_steps: int = 0
    feedback: FeedbackRule | None = None

    @property
    def name(self) -> str:
        """For people."""
        raise NotImplementedError

    @property
    def words(self) -> int:
        """int32 words of the message to one destination."""
        raise NotImplementedError

    @property
    def room(self) -> int:
        """Words of a message that the segment takes: its own, and up to 3 of padding."""
        return aligned(self.words)

    @property
    def compressed(self) -> bool:
        """Whether anything but the buffer itself travels."""
        return True

    @property
    def nominal_bits(self) -> float | None:
        """Bits per element that the codec is known by, without scales; None where no number is."""
        return None

    @property
    def density(self) -> float:
        """Fraction of elements that a rank sends."""
        return 1.0

    @property
    def overshoot(self) -> float:
        """By how much a sum may exceed, relative to the largest magnitudes of what ranks add up,
        what an exact sum of gradients would be: by codes that round up, in this message and in the
        one whose residual it carries, and by scales."""
        return 2**-8

    @property
    def cells(self) -> int:
        """int32 words per destination that are summed on the way, besides the message; an owner
        then decodes one sum, and not what every rank sent."""
        return 0

    @property
    def counts(self) -> int:
        """int32 words per destination that all ranks sum, for the next step's thresholds."""
        return 0

    @property
    def has_shared_support(self) -> bool:
        """Whether all ranks send the groups that the shard's owner chose."""
        return False

    @property
    def reuses_forward_message(self) -> bool:
        """Whether the message of the forward's all-gather serves the backward's, too."""
        return False

    @property
    def of_changes(self) -> bool:
        """Whether a message says what changed since the last one, and all who decode keep a copy
        to add it to."""
        return False

    def cut(self, owners: int) -> tuple[Self, tuple[Cut, ...]] | None:
        """The plan of one of ``owners`` equal slices of the segment, and how its columns are cut;
        None where the codec needs the segment whole."""
        return None

    def of_sums(self) -> Self:
        """The same for what the owner of a slice hands out, which owes what it rounds away, if
        anything is owed at all."""
        owed = None if self.feedback is None else ErrorFeedback(dtype=self.feedback.dtype)
        return replace(self, feedback=owed, warmup_steps=0)

    def scratch_bytes(self, destinations: int, sources: int) -> int:
        """At most, what the CPU's operators take for a moment beside their arguments, to encode for
        so many destinations or to decode what came from so many sources."""
        return 0

    def widened_bytes(self, sources: int) -> int:
        """Bytes that torch takes for a moment on a CPU to add up what came from so many sources: it
        makes float32 of all of it first. The library's own operators do not."""
        return 0

    def sums_bytes(self, rows: int, ranks: int) -> int:
        """As :meth:`scratch_bytes`, where ranks of a host add up so many rows at once."""
        return self.scratch_bytes(rows * ranks, rows * ranks)

    def used_words(self, columns: int) -> int:
        """Words that matter to an owner whose shard fills only the first ``columns`` of the
        segment's (in FSDP1's flat buffer); the others need not be sent."""
        return self.words if columns else 0

    def word_shares(self, columns: Sequence[float]) -> list[float]:
        """Share of the words that each of the segment's parameters takes.

        Args:
            columns: of each of them.
        """
        total = sum(columns) or 1
        return [c / total for c in columns]


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a codec is planned for.

    Attributes:
        columns: elements per destination.
        world_size: ranks whose contributions are summed.
        dtype: of the buffer that the segment is a part of.
        feedback: None where nothing is stored.
        matrices: of what a shard has of every parameter, one after the other, the rows and columns;
            empty unless the codec needs them.
    """

    columns: int
    world_size: int
    dtype: torch.dtype
    feedback: FeedbackRule | None = None
    matrices: Sequence[Sequence[tuple[int, int]]] = ()
