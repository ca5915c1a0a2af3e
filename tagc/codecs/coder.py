"""Turns a unit's columns into messages and back, with the codecs of its segments.

A rank's messages are the rows of one buffer. NCCL copies 16 bytes at a time between addresses that
are multiples of 16, otherwise one element at a time, which for messages is a byte (``reduceCopy``
in its ``common_kernel.h``). Triton's kernels load vectors under the same condition. So every
segment starts at a multiple of 4 words, and every message at a multiple of 32::

    | segment | 0-3 words | segment | 0-3 words | stamp | padding to 32 words |

The padding's content is undefined. The stamp always has room, but is written only if ranks exchange
no headers; see :mod:`tagc.collect.lockstep`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tagc.codecs.codec import CodecSegment, CodecSetup, SelectionCount
from tagc.codecs.exchange import Exchange
from tagc.codecs.feedback import SegmentFeedback
from tagc.codecs.plan import CodecPlan
from tagc.codecs.registry import make_codecs

MESSAGE_FORMAT = 2
"""Version of the layout above. Version 1 had no padding, and no room for a stamp on gloo."""

STAMP_WORDS = 2
_ROW = 32


def row_words(words: int) -> int:
    """Words from the start of one message to the next, if the segments take ``words`` in total."""
    return -(-(words + STAMP_WORDS) // _ROW) * _ROW


class Coder:
    """Turns columns ``[n, S]`` into messages ``[n, words]`` int32 and back, and keeps the codecs'
    state. Messages may be longer than the segments' words; the rest is not touched.

    Attributes:
        codecs: see :func:`tagc.codecs.registry.make_codecs`.
    """

    def __init__(self, segments: Sequence[CodecSegment[CodecPlan]], setup: CodecSetup) -> None:
        """Start with empty state."""
        self.codecs = make_codecs(segments, setup)

    @property
    def feedbacks(self) -> dict[int, SegmentFeedback]:
        """Every segment's feedback, by its first column."""
        return {i: f for codec in self.codecs.values() for i, f in codec.feedbacks.items()}

    def encode(self, grad: Tensor, messages: Tensor, exchange: Exchange) -> None:
        """Write the messages ``[D, words]`` about the gradients ``grad`` ``[D, S]``."""
        for codec in self.codecs.values():
            codec.encode(grad, messages, exchange)

    def start(self, exchange: Exchange) -> None:
        for codec in self.codecs.values():
            codec.start(exchange)

    def wait(self) -> None:
        for codec in self.codecs.values():
            codec.wait()

    def decode(self, received: Tensor, out: Tensor, exchange: Exchange, divisor: int) -> None:
        """Decode all ranks' messages ``[W, words]``, and write their sum, divided by ``divisor``,
        to ``out`` ``[S]``."""
        for codec in self.codecs.values():
            codec.decode(received, out, exchange, divisor)

    def encode_rows(self, rows: Tensor, messages: Tensor) -> None:
        """Write a message about each of ``rows`` ``[n, S]``, without an exchange."""
        for codec in self.codecs.values():
            codec.encode_rows(rows, messages)

    def decode_rows(self, received: Tensor, rows: Tensor) -> None:
        """Decode every message ``[words]`` to its own row ``[S]``, without a sum."""
        for codec in self.codecs.values():
            codec.decode_rows(received, rows)

    def decode_sums(self, received: Tensor, rows: Tensor) -> None:
        """Write sums of messages ``[K, W, words]``, each over ``W`` ranks, to ``rows``
        ``[K, S]``."""
        for codec in self.codecs.values():
            codec.decode_sums(received, rows)

    def skip(self, steps: int) -> None:
        for codec in self.codecs.values():
            codec.skip(steps)

    def selection_counts(self) -> list[SelectionCount]:
        return [count for codec in self.codecs.values() for count in codec.selection_counts()]
