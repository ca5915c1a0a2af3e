"""Collectives for activations and their gradients: floating tensors of any shape, as coded rows.

Nothing here keeps state between calls, so a group can be used for anything in any order. Every rank
ends with the same bits where torch's own collective promises that: an owner sends the sum that it
made as a message, and decodes it from that message, too.

On gloo, ranks that call different collectives, or one with different shapes, never take each
other's messages. They wait until the group's timeout, and raise.

===================  =========================================================================
all-gather           each rank's message to all
reduce-scatter       messages to the owners of chunks, who add them up in float32
all-reduce           reduce-scatter of messages, then an all-gather of the owners' messages about
                     their sums; with 2 ranks one all-gather, which sends as much and rounds once
all-to-all, send     a message about what each rank receives
===================  =========================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tagc.codecs.rows import RowCoder
from tagc.collect.transport import CollectiveWork, Transport
from tagc.groups.works import CodedWork

SMALL_MESSAGE = 2048
"""Elements for one rank below which a tensor travels as it is: norms, losses, sizes."""

CODED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that are coded."""


def is_coded(dtype: torch.dtype, numel: int) -> bool:
    """Whether ``numel`` elements for one rank travel as a message. Both sides must know both."""
    return dtype in CODED and numel >= SMALL_MESSAGE


class CodedCollectives:
    """Collectives over one transport, with one coder.

    All tensors are of a dtype in ``CODED``, on one device, and contiguous. Every method starts its
    collective when it is called; only the sum of an all-reduce is waited for there.
    """

    def __init__(self, transport: Transport, coder: RowCoder) -> None:
        self._transport, self._coder = transport, coder

    def all_gather(self, out: Tensor, inp: Tensor) -> CodedWork:
        """Gather every rank's ``inp`` ``[n]`` in ``out`` ``[W, n]``."""
        coder, n = self._coder, inp.numel()
        transport = self._transport.marked("all-gather", n, inp.dtype)
        messages = coder.encode(coder.cut(inp.view(1, n), coder.rows(n)))
        received, work = _gathered(transport, messages)

        def finish() -> None:
            room = coder.room(out, coder.rows(n))
            coder.decode(received.flatten(0, 1), room)
            _fill(out, room)

        return CodedWork(work, finish, [received])

    def reduce_scatter(self, out: Tensor, inp: Tensor, divisor: int) -> CodedWork:
        """Write the sum of all ranks' row for this rank to ``out`` ``[n]``, divided by ``divisor``;
        ``inp`` is ``[W, n]``, a row for each rank."""
        coder, n = self._coder, out.numel()
        transport = self._transport.marked("reduce-scatter", n, inp.dtype)
        received, work = _sent(transport, coder.encode(coder.cut(inp, coder.rows(n))))

        def finish() -> None:
            room = coder.room(out.view(1, n), coder.rows(n))
            coder.add_up(received, room, divisor)
            _fill(out.view(1, n), room)

        return CodedWork(work, finish, [received])

    def all_reduce(self, tensor: Tensor, divisor: int) -> CodedWork:
        """Replace ``tensor`` ``[n]`` by the sum over ranks, divided by ``divisor``."""
        coder, n, ranks = self._coder, tensor.numel(), self._transport.size
        transport = self._transport.marked("all-reduce", n, tensor.dtype)
        whole = tensor.view(1, n)
        # Every rank owns as many rows of the sum.
        rows = coder.rows(n) if ranks == 2 else ranks * -(-coder.rows(n) // ranks)
        messages = coder.encode(coder.cut(whole, rows))
        if ranks == 2:
            received, work = _gathered(transport, messages)
        else:
            parts, first = _sent(transport, messages)
            first.wait()
            total = torch.empty(
                rows // ranks, coder.elements, dtype=torch.float32, device=tensor.device
            )
            coder.add_up(parts, total, divisor)
            received, work = _gathered(transport, coder.encode(total))
            work.wire_bytes += first.wire_bytes

        def finish() -> None:
            room = coder.room(whole, rows)
            if ranks == 2:
                coder.add_up(received, room, divisor)
            else:
                coder.decode(received.flatten(0, 1), room)
            _fill(whole, room)

        return CodedWork(work, finish, [received])

    def all_to_all(self, out: Sequence[Tensor], inp: Sequence[Tensor]) -> CodedWork:
        """Send ``inp[d]`` to rank ``d``; ``out[r]`` is from rank ``r``. Tensors are flat; each pair
        of ranks sends small ones as they are."""
        arriving = [self.space_for(t) for t in out]
        leaving = [self.message_about(t) for t in inp]
        work = self._transport.marked("all-to-all").exchange(arriving, leaving, in_flight=True)

        def finish() -> None:
            for t, message in zip(out, arriving, strict=True):
                self.read(message, t)

        return CodedWork(work, finish, arriving)

    def message_about(self, t: Tensor) -> Tensor:
        """The bytes, flat uint8, that travel for ``t`` ``[n]``."""
        if not is_coded(t.dtype, t.numel()):
            return t.view(torch.uint8)
        coder, n = self._coder, t.numel()
        return coder.encode(coder.cut(t.view(1, n), coder.rows(n))).view(-1).view(torch.uint8)

    def space_for(self, t: Tensor) -> Tensor:
        """Room for the message about ``t`` ``[n]``: ``t`` itself if it travels as it is."""
        if not is_coded(t.dtype, t.numel()):
            return t.view(torch.uint8)
        words = self._coder.rows(t.numel()) * self._coder.words
        return torch.empty(4 * words, dtype=torch.uint8, device=t.device)

    def read(self, message: Tensor, t: Tensor) -> None:
        """Write what ``message`` says to ``t`` ``[n]``, unless it is ``t``."""
        if not is_coded(t.dtype, t.numel()):
            return
        whole = t.view(1, t.numel())
        room = self._coder.room(whole, self._coder.rows(t.numel()))
        self._coder.decode(message.view(torch.int32).view(-1, self._coder.words), room)
        _fill(whole, room)


def _gathered(transport: Transport, messages: Tensor) -> tuple[Tensor, CollectiveWork]:
    """Every rank's ``messages`` ``[n, words]``, ``[W, n, words]`` once the work is done."""
    received = messages.new_empty(transport.size, *messages.shape)
    flat = received.view(transport.size, -1)
    return received, transport.gather(flat, messages.view(1, -1), in_flight=True)


def _sent(transport: Transport, messages: Tensor) -> tuple[Tensor, CollectiveWork]:
    """Rank ``d`` gets the ``d``-th part of ``messages`` ``[W * n, words]`` of every rank,
    ``[W, n, words]`` once the work is done."""
    received, size = torch.empty_like(messages), transport.size
    rows = received.view(size, -1), messages.view(size, -1)
    work = transport.all_to_all(*rows, in_flight=True)
    return received.view(size, -1, messages.shape[-1]), work


def _fill(t: Tensor, room: Tensor) -> None:
    """Copy the elements of ``t`` ``[n, numel]`` from the rows that they were decoded into."""
    if room.data_ptr() != t.data_ptr():
        t.copy_(room.view(len(t), -1)[:, : t.shape[-1]])
