"""What codecs ask of the ranks that exchange messages, besides the messages.

Codecs start no collective themselves. :mod:`tagc.collect.exchange` is what they are handed, which
counts the bytes.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Until the result can be used (on a GPU: by the current stream)."""
        ...


class Exchange(Protocol):
    """One exchange of messages among ``W`` ranks.

    A rank encodes a buffer ``[D, S]``, a row for every destination, and decodes one row of it from
    the messages of all ``W`` ranks: a reduce-scatter has ``D = W``, an all-reduce ``D = 1``.

    Attributes:
        row: the row that this rank decodes.
        takes_leftovers: whether what this rank's decoding leaves goes into its own residual. Of
            the ranks that decode the same row just one takes it.
    """

    row: int
    takes_leftovers: bool

    def sum_cells(self, cells: Tensor) -> tuple[Work, Tensor]:
        """Start summing ``cells`` ``[D, n]`` over ranks.

        Returns:
            The work, and where the sum ``[n]`` of the row that this rank decodes will be.
        """
        ...

    def sum_counts(self, counts: Tensor) -> Work:
        """Start summing ``counts``, of any shape and int32, over ranks, in place, on all ranks."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """``values`` of every rank, ``[W, *values.shape]``; waits for them."""
        ...
