"""All ranks at the same collective of the same unit, which they know before they send anything.

Where the backend has messages (gloo on a CPU), ranks exchange headers first, on a tag of their own,
and a mix-up is an error on all ranks that are in it. Elsewhere (NCCL) a rank whose neighbours are
in another collective waits, or takes what it gets; there two words behind each message say whose
it is, and are compared on the device.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.comm.alarm import Alarm
from tagc.comm.collectives import by_messages, failing_in, gather_headers
from tagc.plan import Direction

# A header is int64: the step, the words of a message, and the end of the unit's name.
_NUMBERS, _NAME_BYTES = 2, 48
_STAMP_WORDS = 2
_REMEDY = (
    "Every rank must run the same units in the same order, forward and backward: look for a unit, "
    "a micro-batch or a whole step that some ranks leave out"
)


_WORDS: dict[Direction, str] = {
    "gradients": "the reduction of gradients",
    "parameters": "the gathering of parameters",
    "replicas": "the average over replicas",
}


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
        self._stamp: Tensor | None = None
        self._alarm = Alarm(
            f"tagc: {self.what} got a message of another unit, direction or step. {_REMEDY}"
        )

    def stamp_words(self, group: dist.ProcessGroup) -> int:
        """Words behind each message of :meth:`stamp`; 0 where headers are exchanged."""
        return 0 if by_messages(group, self._device) else _STAMP_WORDS

    def check(self, group: dist.ProcessGroup, words: int, step: int | None = None) -> None:
        """To be called before the first collective.

        Args:
            words: of the message to a rank, the same on every rank.
            step: how many there were before, likewise; by default counted here.

        Raises:
            RuntimeError: if another rank is at another collective, or does not answer in time.
        """
        self._alarm.check()
        step, self._count = self._count if step is None else step, self._count + 1
        if not by_messages(group, self._device):
            return
        mine = torch.cat((torch.tensor([step, words], dtype=torch.int64), self._name))
        with failing_in(self.what, group):
            headers = gather_headers(mine, group)
        if torch.equal(headers, mine.expand_as(headers)):
            return
        others = (headers != mine).any(1).nonzero().flatten().tolist()
        raise RuntimeError(
            f"tagc: ranks are at different collectives: rank {group.rank()} of {group.size()} at "
            f"{_told(mine)}, rank {others[0]} at {_told(headers[others[0]])}. {_REMEDY}"
        )

    def stamp(self, tail: Tensor) -> None:
        """Write ``tail`` ``[D, stamp_words]`` int32, behind the messages to all destinations."""
        if tail.shape[1] == 0:
            return
        if self._stamp is None:
            # On the device, now and later: to bring a number there would wait.
            self._stamp = torch.zeros(_STAMP_WORDS, dtype=torch.int32, device=tail.device)
            self._stamp[:1].fill_(self._mark)
        self._stamp[1:].add_(1)
        tail.copy_(self._stamp.expand_as(tail))

    def check_stamps(self, tail: Tensor, out: Tensor) -> None:
        """Compare what is behind the messages of all ranks, ``[W, stamp_words]`` int32.

        Args:
            out: the result, of any floating-point dtype; see :class:`Alarm`.

        Raises:
            RuntimeError: see :class:`Alarm`.
        """
        if self._stamp is not None and tail.shape[1]:
            self._alarm.note((tail != self._stamp).any(), out)


def _told(header: Tensor) -> str:
    step, length = header[:_NUMBERS].tolist()
    name = bytes(header[_NUMBERS:].view(torch.uint8).tolist()).rstrip(b"\0")
    kinds = {direction[:1]: words for direction, words in _WORDS.items()}
    kind = kinds.get(name[:1].decode(errors="replace"), "another collective")
    label = name[1:].decode(errors="replace")
    cut = "..." if len(name) == _NAME_BYTES else ""
    return f"{kind} of unit '{cut}{label}' (step {step}, {length} words)"
