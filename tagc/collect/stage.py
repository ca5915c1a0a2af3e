"""Stages of a reduction: each is a collective, its ranks and the coder of its messages.

:class:`tagc.collect.UnitReducer` leads a unit's gradients through one or two stages::

    [W, S] --HostSum--> [H, S] --ReduceMessages--> [S]     or TwoShots, or Sum, or Native

``HostSum`` runs only if ranks of a host add up first. ``Sum`` and ``Native`` send gradients
uncompressed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.basics.profiled import profiled
from tagc.codecs import STAMP_WORDS, Codec, CodecSetup, Coder
from tagc.codecs.feedback import SegmentFeedback
from tagc.codecs.workspace import Workspace
from tagc.collect.counters import Counters
from tagc.collect.exchange import Exchange
from tagc.collect.lockstep import Lockstep
from tagc.collect.part import Part
from tagc.collect.set_aside import Debt
from tagc.collect.transport import CollectiveWork, Transport
from tagc.plan import MessagePlan, UnitPlan

ReduceNatively = Callable[[Tensor, Tensor, Transport, dist.ReduceOp.RedOpType], CollectiveWork]
"""Reduces its second argument to the first; where all ranks get all rows, both are one tensor."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """The parameters of one reduction, for its stages.

    Attributes:
        transport: connects the ranks that exchange messages: the whole group, or the ranks with the
            same place on each host.
        op: SUM or AVG; :class:`Native` takes any.
        divisor: divides the sum.
        compresses: whether messages are sent; otherwise gradients are summed uncompressed.
        on_hosts: whether ranks of a host add up first.
        part: :attr:`Part.mark` of the part of the unit that the backward reached; 0 for the whole
            unit.
        native: replaces the backend's reduce-scatter; see :class:`Native`.
    """

    transport: Transport
    op: dist.ReduceOp.RedOpType
    divisor: int
    compresses: bool
    on_hosts: bool = False
    part: int = 0
    native: ReduceNatively | None = None


@dataclass(frozen=True, kw_only=True)
class StageSetup:
    """The constructor arguments that a unit's stages share.

    Attributes:
        codec: setup of the codecs whose messages go to other hosts.
    """

    unit: UnitPlan
    codec: CodecSetup
    lockstep: Lockstep
    counters: Counters

    @property
    def workspace(self) -> Workspace:
        """Scratch buffers."""
        return self.codec.workspace


class Stage(ABC):
    """One collective of a reduction, and the coder of its messages, if it has any."""

    def __init__(self, setup: StageSetup) -> None:
        self._setup, self._counters = setup, setup.counters
        self._name = setup.unit.info.label

    @abstractmethod
    def run(self, rows: Tensor, out: Tensor, call: Call) -> None:
        """Sum all ranks' ``rows`` and write this rank's part to ``out``. All ranks call it
        together."""


class Native(Stage):
    """The backend's own reduce-scatter, or the call's replacement for it."""

    def run(self, rows: Tensor, out: Tensor, call: Call) -> None:
        """See :meth:`Stage.run`; ``rows`` are flat, ``[W * S]``."""
        if call.native is None:
            work = call.transport.reduce_scatter(out, rows, call.op)
        else:
            work = call.native(out, rows, call.transport, call.op)
        work.wait()
        self._counters.native_bytes += work.wire_bytes


class Sum(Stage):
    """Sums uncompressed gradients in their own dtype, and then divides."""

    def run(self, rows: Tensor, out: Tensor, call: Call) -> None:
        """See :meth:`Stage.run`; across replicas ``out`` may be ``rows``."""
        if self._setup.unit.for_all:
            if out.data_ptr() != rows.data_ptr():
                out.copy_(rows.view_as(out))
            work = call.transport.all_reduce(out)
        else:
            scratch = rows
            if call.transport.adds_itself(rows.device):
                take = self._setup.workspace.take
                scratch = take("dense_recv", tuple(rows.shape), rows.dtype)
            work = call.transport.sum_rows(out, rows, scratch)
        work.wait()
        if call.op == dist.ReduceOp.AVG:
            out.div_(call.divisor)
        self._counters.native_bytes += work.wire_bytes


class Messages(ABC):
    """A stage that sends gradients in messages. It may pause while they are in flight.

    Attributes:
        coder: encodes and decodes the messages that carry gradients.
        owner_coder: the same for messages in which owners send out sums; None if there are none.
    """

    coder: Coder
    owner_coder: Coder | None = None

    def __init__(self, setup: StageSetup) -> None:
        self._setup, self._counters = setup, setup.counters
        self._name = setup.unit.info.label

    @abstractmethod
    def running(self, rows: Tensor, out: Tensor, call: Call) -> Iterator[None]:
        """:meth:`Stage.run` as a generator, which pauses while messages are in flight. Meanwhile
        other units may be reduced, if these have another workspace."""

    @property
    @abstractmethod
    def feedbacks(self) -> Mapping[int, SegmentFeedback]:
        """Every segment's feedback, by the segment's first column in the unit."""

    @property
    def owner_feedbacks(self) -> Mapping[int, SegmentFeedback]:
        """The feedbacks of the sums that this rank sends out as an owner."""
        return {}

    @abstractmethod
    def debts(self, part: Part, rank: int) -> list[Debt]:
        """Where the feedbacks keep state for the parameters that the backward did not reach."""

    @abstractmethod
    def memory(self) -> Iterator[tuple[str, Codec]]:
        """The codecs that keep state between steps, each with the name of its state."""

    @abstractmethod
    def skip(self, steps: int) -> None:
        """Continue as if this stage had already run ``steps`` times."""


class MessageRows:
    """Buffers for the messages that a rank sends and receives, and the stamps in them."""

    def __init__(self, plan: MessagePlan, setup: StageSetup) -> None:
        self._plan, self._lockstep, self._workspace = plan, setup.lockstep, setup.workspace

    def take(self) -> tuple[Tensor, Tensor]:
        """Buffers to send, ``[D, row_words]``, and to receive, ``[W, row_words]``, int32. They are
        valid until the next call."""
        plan, take = self._plan, self._workspace.take
        send = take("message_send", (plan.made, plan.row_words), torch.int32)
        received = take("message_recv", (plan.read, plan.row_words), torch.int32)
        return send, received

    def stamp(self, send: Tensor, call: Call) -> None:
        """Stamp messages with unit, step and part. See :meth:`Lockstep.stamp`."""
        if self._plan.sent is None:  # otherwise the end of a message, and so its stamp, is not sent
            self._lockstep.stamp(self._stamps(send), call.transport, call.part)

    def check(self, received: Tensor, out: Tensor) -> None:
        """Compare the stamps of received messages. See :meth:`Lockstep.check_stamps`."""
        self._lockstep.check_stamps(self._stamps(received), out[:1])

    def _stamps(self, messages: Tensor) -> Tensor:
        words = self._plan.words
        return messages[:, words : words + STAMP_WORDS]


class ReduceMessages(Messages):
    """Encodes a row for each destination, then decodes and sums the messages that it receives.

    This is a reduce-scatter; across replicas it is an all-reduce, with one message for all.
    """

    def __init__(self, plan: MessagePlan, setup: StageSetup) -> None:
        """Start with empty state."""
        super().__init__(setup)
        self._plan, self._rows = plan, MessageRows(plan, setup)
        self.coder = Coder(plan.segments, setup.codec)
        self._begun = False

    def running(self, rows: Tensor, out: Tensor, call: Call) -> Iterator[None]:
        """See :meth:`Messages.running`: ``[D, S]`` to ``[S]``."""
        transport, plan, lockstep = call.transport, self._plan, self._setup.lockstep
        exchange = Exchange(transport, self._setup.workspace, for_all=plan.for_all)
        send, received = self._rows.take()
        self._rows.stamp(send, call)
        if not self._begun:
            # Only in its first reduction does a codec exchange anything before its message.
            lockstep.confirm()
        # A part may leave out codecs; those begin in a later reduction.
        self._begun = call.part == 0
        with profiled("encode", self._name):
            self.coder.encode(rows, send, exchange)
        with profiled("exchange", self._name):
            lockstep.confirm()
            if plan.for_all:
                work = transport.gather(received, send)
            else:
                work = transport.all_to_all(received, send, plan.sent)
            self.coder.start(exchange)
            yield
            work.wait()
            self.coder.wait()
        with profiled("decode", self._name):
            self.coder.decode(received, out, exchange, call.divisor)
            self._rows.check(received, out)
        self._counters.message_bytes += work.wire_bytes
        self._counters.other_bytes += exchange.wire_bytes

    @property
    def feedbacks(self) -> Mapping[int, SegmentFeedback]:
        return self.coder.feedbacks

    def debts(self, part: Part, rank: int) -> list[Debt]:
        columns = {s.start: part.missing_columns(s) for s in self._plan.segments}
        return [Debt(f, columns[i], columns[i]) for i, f in self.feedbacks.items()]

    def memory(self) -> Iterator[tuple[str, Codec]]:
        yield from self.coder.codecs.items()

    def skip(self, steps: int) -> None:
        self.coder.skip(steps)
