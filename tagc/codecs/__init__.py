"""Codecs: how the segments of a unit travel.

Each kind of codec has a class that holds the state of all its segments in one unit, its
*columns*, with the methods of :class:`Columns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Columns(Protocol):
    """The segments of one codec in one unit.

    ``D`` destinations get a message each from this rank, and ``W`` ranks take part: a
    reduce-scatter has ``D = W``, an all-reduce ``D = 1``, the message being for everybody.

    Attributes:
        words: int32 words that these segments take in a message.
        wire_bytes: bytes sent to other ranks so far, beside the messages.
    """

    words: int
    wire_bytes: int

    def encode(self, grad: Tensor, message: Tensor, group: dist.ProcessGroup) -> None:
        """Write this rank's part of the columns of ``grad`` ``[D, S]`` to ``message``
        ``[D, words]`` int32."""
        ...

    def start(self, group: dist.ProcessGroup) -> None:
        """Start what else has to be exchanged; the messages are not this method's business."""
        ...

    def wait(self) -> None:
        """Until that is here."""
        ...

    def decode(self, received: Tensor, out: Tensor, owner: int, divisor: int) -> None:
        """Write the sum over ranks, divided by ``divisor``, to the columns of ``out`` ``[S]``.

        Args:
            received: ``[W, words]`` int32, message ``r`` from rank ``r``.
            owner: row of ``grad`` that this shard is.
        """
        ...

    def warm_up(self, out: Tensor) -> None:
        """After a dense reduction to ``out`` ``[S]``: let what the owner keeps follow, and write
        to ``out`` what it hands out."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What the next step and the counters depend on, beside the residuals: live tensors or
        new ones, after waiting for what is in flight. The names and shapes never change."""
        ...

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values (names, shapes and dtypes being right) that the next step
        could not work with."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken, given that it passes the check."""
        ...


def nested(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A part's state under names that begin with the part's own."""
    return {f"{name}.{key}": tensor for key, tensor in state.items()}


def part_of(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`nested`."""
    start = f"{name}."
    return {k.removeprefix(start): t for k, t in state.items() if k.startswith(start)}
