"""The exchanges that codecs may use besides messages.

Codecs start no collectives themselves. :mod:`tagc.collect.exchange` has the implementation, which
counts the bytes.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Wait until the result can be used (on a GPU: by the current stream)."""
        ...


class Exchange(Protocol):
    """One exchange of messages among ``W`` ranks.

    A rank encodes a buffer ``[D, S]``, a row for every destination, and decodes one row of it from
    the messages of all ``W`` ranks: a reduce-scatter has ``D = W``, an all-reduce ``D = 1``.

    Attributes:
        row: the row that this rank decodes.
        takes_leftovers: whether this rank adds what it could not decode to its residual. Of the
            ranks that decode the same row, only one does.
    """

    row: int
    takes_leftovers: bool

    def sum_cells(self, cells: Tensor) -> tuple[Work, Tensor]:
        """Start summing ``cells`` ``[D, n]`` over ranks.

        Returns:
            The work, and the tensor ``[n]`` that receives the sum for this rank's row.
        """
        ...

    def sum_counts(self, counts: Tensor) -> Work:
        """Start an all-reduce of ``counts``, int32 of any shape, in place."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """Every rank's ``values``, ``[W, *values.shape]``. Blocks."""
        ...
