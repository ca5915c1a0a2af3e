"""All ranks at the same collective of the same unit, and an error where they are not.

Where the backend has messages (gloo on a CPU), ranks exchange headers on a tag of their own before
anything else is sent, and a mix-up is an error on all ranks that are in it. Headers travel while a
message is encoded. Elsewhere (NCCL) a rank whose neighbours are in another collective waits, or
takes what it gets; there two words behind each message say whose it is, and are compared on the
device.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from tagc.codecs import STAMP_WORDS
from tagc.collect.alarm import Alarm
from tagc.collect.transport import CollectiveWork, Transport, failing_in
from tagc.plan import Direction

# A header is int64: step, words of a message, part of the unit, and the end of the unit's name.
_NUMBERS, _NAME_BYTES = 3, 48
_REMEDY = (
    "Every rank must run the same units in the same order, forward and backward: look for a unit, "
    "a micro-batch or a whole step that some ranks leave out, or for parameters that only some of "
    "them use"
)


_WORDS: dict[Direction, str] = {
    "gradients": "the reduction of gradients",
    "parameters": "the gathering of parameters",
    "replicas": "the average over replicas",
}


class DesyncError(RuntimeError):
    """Ranks are at different collectives."""


class Lockstep:
    """The collectives of one unit in one direction, of which every rank must have as many.

    Attributes:
        what: their name, for people.
    """

    def __init__(self, direction: Direction, label: str, device: torch.device) -> None:
        self.what = f"{_WORDS[direction]} of unit {label!r}"
        self._device, self._count = device, 0
        name = direction[:1].encode() + label.encode()[1 - _NAME_BYTES :]
        self._name = torch.frombuffer(bytearray(name.ljust(_NAME_BYTES, b"\0")), dtype=torch.int64)
        self._mark = zlib.crc32(f"{direction} {label}".encode()) % 2**31
        self._pending: list[tuple[Transport, CollectiveWork, Tensor, Tensor]] = []
        self._stamp: Tensor | None = None
        self._stamped = -1
        self._alarm = Alarm(
            f"tagc: {self.what} got a message of another unit, direction or step. {_REMEDY}"
        )

    def check(self, transport: Transport, words: int, step: int | None = None) -> None:
        """Before a collective with nothing to do until then: both of what follows."""
        self.announce([transport], words, step)
        self.confirm()

    def announce(
        self,
        transports: Sequence[Transport],
        words: int,
        step: int | None = None,
        part: int = 0,
    ) -> None:
        """Start telling the others where this rank is.

        Args:
            transports: to the others.
            words: of the message to a rank, the same on every rank.
            step: how many collectives there were before, likewise; by default counted here.
            part: of the unit's parameters that this is about, a number; 0 for all.

        Raises:
            RuntimeError: for what is known by now of an earlier one, see :class:`Alarm`.
        """
        self._alarm.check()
        step, self._count = self._count if step is None else step, self._count + 1
        self._pending.clear()
        for transport in transports:
            if transport.by_messages(self._device):
                numbers = torch.tensor([step, words, part], dtype=torch.int64, device="cpu")
                mine = torch.cat((numbers, self._name))
                with failing_in(self.what, transport.group):
                    self._pending.append((transport, *transport.gather_headers(mine), mine))

    def confirm(self) -> None:
        """Wait for what the others told; nothing if that was done.

        Raises:
            DesyncError: if another rank is at another collective.
            RuntimeError: if it does not answer in time.
        """
        while self._pending:
            transport, work, headers, mine = self._pending.pop()
            with failing_in(self.what, transport.group):
                work.wait()
            others = (headers != mine).any(1).nonzero().flatten().tolist()
            if others:
                raise DesyncError(
                    f"tagc: ranks are at different collectives: rank {transport.rank} of "
                    f"{transport.size} at {_told(mine)}, rank {others[0]} at "
                    f"{_told(headers[others[0]])}. {_REMEDY}"
                )

    def stamp(self, tail: Tensor, transport: Transport, part: int = 0) -> None:
        """Write ``tail`` ``[D, STAMP_WORDS]`` int32, behind the messages to all destinations;
        nothing where headers are exchanged."""
        if transport.by_messages(self._device):
            return
        if self._stamp is None:
            # On the device, now and later: to bring a number there would wait.
            self._stamp = torch.zeros(STAMP_WORDS, dtype=torch.int32, device=tail.device)
        if self._stamped != part:
            self._stamp[:1].fill_(self._mark ^ part)
            self._stamped = part
        self._stamp[1:].add_(1)
        tail.copy_(self._stamp.expand_as(tail))

    def check_stamps(self, tail: Tensor, out: Tensor) -> None:
        """Compare what is behind the messages of all ranks, ``[W, STAMP_WORDS]`` int32.

        Args:
            out: the result, of any floating-point dtype; see :class:`Alarm`.

        Raises:
            RuntimeError: see :class:`Alarm`.
        """
        if self._stamp is not None:
            self._alarm.note((tail != self._stamp).any(), out)


def _told(header: Tensor) -> str:
    step, length, part = header[:_NUMBERS].tolist()
    name = bytes(header[_NUMBERS:].view(torch.uint8).tolist()).rstrip(b"\0")
    kinds = {direction[:1]: words for direction, words in _WORDS.items()}
    kind = kinds.get(name[:1].decode(errors="replace"), "another collective")
    label = name[1:].decode(errors="replace")
    cut = "..." if len(name) == _NAME_BYTES else ""
    reached = f", some of its parameters only: {part:08x}" if part else ""
    return f"{kind} of unit '{cut}{label}' (step {step}, {length} words{reached})"
