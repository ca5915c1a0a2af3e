"""Where the words of segments lie in a message, and where the next message begins.

A rank's messages are the rows of one buffer. NCCL copies 16 bytes at a time between addresses that
are multiples of 16, and a byte at a time between others (``BytePerPack`` of its
``common_kernel.h``); Triton's kernels load vectors under the same condition. So every segment
starts at a multiple of 4 words, and every message at a multiple of 32::

    | segment | 0-3 words | segment | 0-3 words | stamp | padding to 32 words |

What the padding holds is not defined. The stamp is written where no headers are exchanged, see
:mod:`tagc.comm.lockstep`; its room is there in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from tagc.codecs.codec import Codec

MESSAGE_FORMAT = 2
"""Of what ranks send each other; 1 had neither padding nor, with headers, room for a stamp."""

STAMP_WORDS = 2
_ROW = 32


def row_words(words: int) -> int:
    """Words from one message to the next, where segments take so many."""
    return -(-(words + STAMP_WORDS) // _ROW) * _ROW


def split_message(
    message: Tensor, codecs: Iterable[Codec[Any]]
) -> Iterator[tuple[Codec[Any], Tensor]]:
    """Every codec, and its words of ``message`` ``[..., words]``, which may be longer."""
    start = 0
    for codec in codecs:
        yield codec, message[..., start : start + codec.words]
        start += codec.words
