"""A unit's columns, turned into messages and back: the codecs of its segments, and their places.

A rank's messages are the rows of one buffer. NCCL copies 16 bytes at a time between addresses that
are multiples of 16, and a byte at a time between others (``BytePerPack`` of its
``common_kernel.h``); Triton's kernels load vectors under the same condition. So every segment
starts at a multiple of 4 words, and every message at a multiple of 32::

    | segment | 0-3 words | segment | 0-3 words | stamp | padding to 32 words |

What the padding holds is not defined. The stamp is written where no headers are exchanged, see
:mod:`tagc.comm.lockstep`; its room is there in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tagc.codecs.codec import Codec, CodecSegment, CodecSetup, SelectionCount
from tagc.codecs.exchange import Exchange
from tagc.codecs.feedback import SegmentFeedback
from tagc.codecs.plan import CodecPlan
from tagc.codecs.registry import kind_of, make_codecs

MESSAGE_FORMAT = 2
"""Of what ranks send each other; 1 had neither padding nor, with headers, room for a stamp."""

STAMP_WORDS = 2
_ROW = 32


def row_words(words: int) -> int:
    """Words from one message to the next, where segments take so many."""
    return -(-(words + STAMP_WORDS) // _ROW) * _ROW


class Coder:
    """Turns columns ``[n, S]`` into messages ``[n, words]`` int32 and back, with what that takes
    from step to step. Messages may have more words than are written and read.

    Attributes:
        codecs: by name, in the order of their words in a message.
        words: of a message, all segments.
    """

    def __init__(
        self,
        segments: Sequence[CodecSegment[CodecPlan]],
        setup: CodecSetup,
        *,
        apart: bool = False,
    ) -> None:
        """New state.

        Args:
            apart: a codec for every segment, by its first column and in the order of the columns;
                else one for all of a kind, in the order of ``CODECS``.
        """
        self.codecs: dict[str, Codec[Any]] = (
            {str(s.start): kind_of(s.codec).codec([s], setup) for s in segments}
            if apart
            else make_codecs(segments, setup)
        )
        self.words = 0
        self._places: list[tuple[Codec[Any], slice]] = []
        for codec in self.codecs.values():
            self._places.append((codec, slice(self.words, self.words + codec.words)))
            self.words += codec.words

    def split(self, messages: Tensor) -> list[tuple[Codec[Any], Tensor]]:
        """Every codec, and its words of ``messages`` ``[..., words]``."""
        return [(codec, messages[..., words]) for codec, words in self._places]

    @property
    def feedbacks(self) -> dict[int, SegmentFeedback]:
        """Of every segment, by its first column."""
        return {i: f for codec in self.codecs.values() for i, f in codec.feedbacks.items()}

    def encode(self, grad: Tensor, messages: Tensor, exchange: Exchange) -> None:
        """Write the messages ``[D, words]`` about the gradients ``grad`` ``[D, S]``."""
        for codec, words in self.split(messages):
            codec.encode(grad, words, exchange)

    def start(self, exchange: Exchange) -> None:
        """See :meth:`Codec.start`."""
        for codec in self.codecs.values():
            codec.start(exchange)

    def wait(self) -> None:
        """See :meth:`Codec.wait`."""
        for codec in self.codecs.values():
            codec.wait()

    def decode(self, received: Tensor, out: Tensor, exchange: Exchange, divisor: int) -> None:
        """Write the sum over ranks of what their messages ``[W, words]`` are about, divided, to
        ``out`` ``[S]``."""
        for codec, words in self.split(received):
            codec.decode(words, out, exchange, divisor)

    def encode_rows(self, rows: Tensor, messages: Tensor) -> None:
        """Write a message about each of ``rows`` ``[n, S]``, without an exchange."""
        for codec, words in self.split(messages):
            codec.encode_rows(rows, words)

    def decode_rows(self, received: Tensor, rows: Tensor) -> None:
        """The inverse: nothing is added up."""
        for codec, words in self.split(received):
            codec.decode_rows(words, rows)

    def decode_sums(self, received: Tensor, rows: Tensor) -> None:
        """Write sums of messages ``[K, W, words]``, each over ``W`` ranks, to ``rows``
        ``[K, S]``."""
        for codec, words in self.split(received):
            codec.decode_sums(words, rows)

    def skip(self, steps: int) -> None:
        """Go on as if so many encodings had been made elsewhere."""
        for codec in self.codecs.values():
            codec.skip(steps)

    def selection_counts(self) -> list[SelectionCount]:
        """See :meth:`Codec.selection_counts`."""
        return [count for codec in self.codecs.values() for count in codec.selection_counts()]

    def differ(self, message: Tensor, other: Tensor) -> Tensor:
        """Whether two messages ``[words]`` say anything else, whatever their padding holds;
        boolean, ``[]``."""
        spans: list[slice] = []
        for codec, place in self._places:
            for part in codec.parts:
                start, stop = place.start + part.words.start, place.start + part.words.stop
                if spans and spans[-1].stop == start:
                    start = spans.pop().start
                spans.append(slice(start, stop))
        return torch.stack([(message[span] != other[span]).any() for span in spans]).any()
