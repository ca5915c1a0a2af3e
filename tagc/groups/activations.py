"""Collectives for activations and their gradients: floating tensors of any shape, as messages.

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

A coder may need a longer message than usual, which only its sender knows (codec ``exact``). On
gloo every receive has room for the longest, and takes shorter ones, too. NCCL needs the length on
both sides: there ranks agree first, by an all-reduce of one number for which the host waits, and if
any message of any rank is long, all are. Two ranks that send to each other cannot agree without
waiting for each other, so on NCCL sends and receives are left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from tagc.codecs.rows import Coder
from tagc.collect.transport import CollectiveWork, Transport
from tagc.groups.works import CodedWork

SMALL_MESSAGE = 2048
"""Elements for one rank below which a tensor travels as it is: norms, losses, sizes."""


class CodedCollectives:
    """Collectives over one transport, with one coder.

    All tensors are of a dtype of the coder, on one device, and contiguous. Every method starts its
    collective when it is called; only the sum of an all-reduce is waited for there.
    """

    def __init__(self, transport: Transport, coder: Coder) -> None:
        self._transport, self._coder = transport, coder

    def codes(self, t: Tensor, numel: int) -> bool:
        """Whether ``numel`` elements of ``t`` for one rank travel as a message. Both sides must
        know both."""
        return t.dtype in self._coder.dtypes and numel >= SMALL_MESSAGE

    def codes_messages(self, t: Tensor) -> bool:
        """Whether two ranks send each other ``t`` as a message."""
        known = not self._coder.varies or self._transport.by_messages(t.device)
        return known and self.codes(t, t.numel())

    def all_gather(self, out: Tensor, inp: Tensor) -> CodedWork:
        """Gather every rank's ``inp`` ``[n]`` in ``out`` ``[W, n]``."""
        n = inp.numel()
        transport = self._transport.marked("all-gather", n, inp.dtype)
        received, work = self._sent(transport, inp[None])
        return CodedWork(work, lambda: self._coder.decode(received, out), [received])

    def reduce_scatter(self, out: Tensor, inp: Tensor, divisor: int) -> CodedWork:
        """Write the sum of all ranks' row for this rank to ``out`` ``[n]``, divided by ``divisor``;
        ``inp`` is ``[W, n]``, a row for each rank."""
        transport = self._transport.marked("reduce-scatter", out.numel(), inp.dtype)
        received, work = self._sent(transport, inp)
        return CodedWork(work, lambda: self._coder.add_up(received, out, divisor), [received])

    def all_reduce(self, tensor: Tensor, divisor: int) -> CodedWork:
        """Replace ``tensor`` ``[n]`` by the sum over ranks, divided by ``divisor``."""
        coder, n, ranks = self._coder, tensor.numel(), self._transport.size
        transport = self._transport.marked("all-reduce", n, tensor.dtype)
        if ranks == 2:
            received, work = self._sent(transport, tensor[None])
            return CodedWork(work, lambda: coder.add_up(received, tensor, divisor), [received])
        part = coder.part(n, ranks)
        missing = ranks * part - n
        parts, first = self._sent(
            transport, (pad(tensor, (0, missing)) if missing else tensor).view(ranks, part)
        )
        first.wait()
        total = coder.total(parts, part, divisor)
        received, work = self._sent(transport, total[None])
        work.wire_bytes += first.wire_bytes

        def finish() -> None:
            whole = tensor.new_empty(ranks, part) if missing else tensor.view(ranks, part)
            coder.decode(received, whole)
            if missing:
                tensor.copy_(whole.view(-1)[:n])

        return CodedWork(work, finish, [received])

    def all_to_all(self, out: Sequence[Tensor], inp: Sequence[Tensor]) -> CodedWork:
        """Send ``inp[d]`` to rank ``d``; ``out[r]`` is from rank ``r``. Tensors are flat; each pair
        of ranks sends small ones as they are."""
        transport = self._transport.marked("all-to-all")
        arriving, leaving = [self.space_for(t) for t in out], [self._encoded(t) for t in inp]
        if transport.by_messages(inp[0].device):
            used = [self._length(m, self._usual(t)) for m, t in zip(leaving, inp, strict=True)]
            work = transport.exchange(arriving, leaving, used=used)
        else:
            coded = [m for m, t in zip(leaving, inp, strict=True) if self.codes(t, t.numel())]
            if not self._any_long(transport, coded, inp[0].device):
                arriving = [m[: self._usual(t)] for m, t in zip(arriving, out, strict=True)]
                leaving = [m[: self._usual(t)] for m, t in zip(leaving, inp, strict=True)]
            work = transport.exchange(arriving, leaving, in_flight=True)

        def finish() -> None:
            for t, message in zip(out, arriving, strict=True):
                self.read(message, t)

        return CodedWork(work, finish, arriving)

    def message_about(self, t: Tensor) -> Tensor:
        """The bytes, flat uint8, that a rank sends another one for ``t`` ``[n]``."""
        message = self._encoded(t)
        return message[: self._length(message, self._usual(t))]

    def space_for(self, t: Tensor) -> Tensor:
        """Room for the message about ``t`` ``[n]``: ``t`` itself if it travels as it is."""
        if not self.codes(t, t.numel()):
            return t.view(torch.uint8)
        most = self._coder.lengths(t.numel())[1]
        return torch.empty(4 * most, dtype=torch.uint8, device=t.device)

    def read(self, message: Tensor, t: Tensor) -> None:
        """Write what ``message`` says to ``t`` ``[n]``, unless it is ``t``."""
        if self.codes(t, t.numel()):
            self._coder.decode(message.view(torch.int32)[None], t[None])

    def _encoded(self, t: Tensor) -> Tensor:
        """The bytes of the message about ``t`` ``[n]``, with the room for the longest."""
        if not self.codes(t, t.numel()):
            return t.view(torch.uint8)
        return self._coder.encode(t[None])[0].view(torch.uint8)

    def _usual(self, t: Tensor) -> int:
        """Bytes of the message about ``t`` ``[n]``, unless it is long."""
        if not self.codes(t, t.numel()):
            return t.numel() * t.element_size()
        return 4 * self._coder.lengths(t.numel())[0]

    def _sent(self, transport: Transport, t: Tensor) -> tuple[Tensor, CollectiveWork]:
        """Every rank's message about row ``r`` of its ``t`` ``[W, n]``, where this is rank ``r``;
        or about its only row, ``[1, n]``. ``[W, words]`` once the work is done."""
        messages, (usual, most) = self._coder.encode(t), self._coder.lengths(t.shape[-1])
        size = transport.size
        if transport.by_messages(t.device):
            received = messages.new_empty(size, most)
            used = [self._length(message, usual) for message in messages] * (size // len(t))
            sent = messages.expand(size, -1).unbind()
            return received, transport.exchange(received.unbind(), sent, used=used)
        words = most if self._any_long(transport, messages, t.device) else usual
        received = messages.new_empty(size, words)
        if len(t) == 1:
            return received, transport.gather(received, messages[:, :words], in_flight=True)
        sent = messages[:, :words].contiguous()
        return received, transport.all_to_all(received, sent, in_flight=True)

    def _length(self, message: Tensor, usual: int) -> int:
        """How much of a message travels, if every message has a length of its own."""
        if len(message) > usual and self._coder.is_long(message):
            return len(message)
        return usual

    def _any_long(
        self, transport: Transport, messages: Tensor | Sequence[Tensor], device: torch.device
    ) -> bool:
        """Whether any message of any rank is long. All ranks of the group call it together."""
        if not self._coder.varies:
            return False
        flag = torch.zeros(1, dtype=torch.bool, device=device)
        for message in messages:
            flag |= self._coder.is_long(message)
        long = flag.to(torch.int32)
        transport.all_reduce(long, dist.ReduceOp.MAX).wait()
        return bool(long)
