"""The contract of an exchange: how what codecs encode reaches the ranks that decode it.

Codecs start no collective themselves: what else than messages they need, they ask of the exchange
that the reducer hands them, which counts the bytes. :mod:`tagc.comm.exchanges` has the exchanges.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Work(Protocol):
    """A collective in flight.

    Attributes:
        wire_bytes: bytes that this rank sends to others.
    """

    wire_bytes: int

    def wait(self) -> None:
        """Until the result can be used (on a GPU: by the current stream)."""
        ...


class Exchange(Protocol):
    """One unit's collectives in one direction, over one group of ``W`` ranks, or in two levels.

    A rank encodes a buffer ``[D, S]``, a row for every destination, and decodes one row of it from
    the messages of all ``W`` ranks: a reduce-scatter has ``D = W``, an all-reduce ``D = 1``. Where
    ranks of a host add up first, ``W`` are hosts; where they hand messages on, all ranks.

    Attributes:
        row: the row that this rank decodes.
        takes_leftovers: whether what this rank's decoding leaves goes into its own residual. Of
            the ranks that decode the same row just one takes it.
        wire_bytes: bytes that this rank sent to others so far, messages not counted.
    """

    row: int
    takes_leftovers: bool
    wire_bytes: int

    def add_inside(self, grad: Tensor) -> Tensor:
        """Add up what neighbours have before anything is encoded.

        Args:
            grad: the unit's buffer: ``[ranks, S]``, or ``[1, S]`` for an all-reduce.

        Returns:
            ``[D, S]``: ``grad`` itself where every rank sends for itself.
        """
        ...

    def send(self, received: Tensor, message: Tensor) -> Work:
        """Start sending the rows of ``message`` ``[D, words]`` to their destinations; row ``r`` of
        ``received`` ``[W, words]`` comes from rank ``r``. Both int32."""
        ...

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
