"""The first of two levels: the ranks of a host add up gradients before they send messages to other
hosts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tagc.basics.profiled import profiled
from tagc.codecs import Codec, Coder
from tagc.collect.stage import Call, Stage, StageSetup
from tagc.collect.transport import Transport, failing_in


class HostSum(Stage):
    """Sums a host's gradients: ``[H * R, S]`` to ``[H, S]``, or with DDP ``[R, S]`` to ``[1, S]``.

    Rank ``h * R + r`` gets host ``h``'s sums of the rows of the ranks ``r`` of all hosts; with DDP,
    of row ``r``. The ranks of a host send each other gradients uncompressed, or in messages without
    error feedback (:mod:`tagc.plan.inside`).
    """

    def __init__(self, setup: StageSetup, inside: Transport | None) -> None:
        """Start with empty state.

        Args:
            inside: connects the ranks of the host; None if compression is switched off.
        """
        super().__init__(setup)
        unit = setup.unit
        self._transport, self._message = inside, unit.inside
        self._coder: Coder | None = None
        if self._message is not None:
            ranks = unit.info.ranks_per_host
            codec = replace(setup.codec, destinations=unit.rows, world_size=ranks, stage=3)
            self._coder = Coder(self._message.segments, codec)

    @property
    def transports(self) -> list[Transport]:
        """The transport between the ranks of the host; empty if compression is switched off."""
        return [] if self._transport is None else [self._transport]

    def room(self, grad: Tensor) -> Tensor:
        """A buffer ``[H, S]`` for the sum of ``grad`` ``[W, S]``, valid until the next call."""
        shape = (len(grad) // self._setup.unit.info.ranks_per_host, grad.shape[1])
        return self._setup.workspace.take("inside_sum", shape, grad.dtype)

    def room_for_average(self, rows: Tensor) -> Tensor:
        """A buffer ``[S]`` for the average of this rank's row over hosts, valid until the next
        call."""
        return self._setup.workspace.take("host_average", (rows.shape[1],), rows.dtype)

    def hand_on(self, average: Tensor, out: Tensor) -> None:
        """Gather the averages ``[S]`` of all ranks of the host to ``out`` ``[R * S]``."""
        assert self._transport is not None
        work = self._transport.gather(out.view(self._transport.size, -1), average[None])
        work.wait()
        self._counters.inside_bytes += work.wire_bytes

    def run(self, rows: Tensor, out: Tensor, call: Call) -> None:
        """See :meth:`Stage.run`. Messages are added in rank order, uncompressed gradients in the
        order of the backend, or of torch's ``sum``."""
        assert self._transport is not None
        with (
            failing_in(self._setup.lockstep.what, self._transport.group),
            profiled("add inside the host", self._name),
        ):
            if self._coder is None or not call.compresses:
                self._add(rows, out, self._transport)
            else:
                self._add_messages(self._coder, rows, out, self._transport)

    def _add(self, grad: Tensor, total: Tensor, inside: Transport) -> None:
        rows = grad.view(len(total), inside.size, -1)
        scratch = rows
        if inside.adds_itself(grad.device):
            scratch = self._setup.workspace.take("inside_recv", tuple(rows.shape), grad.dtype)
        work = inside.sum_each(total, rows, scratch)
        work.wait()
        self._counters.inside_bytes += work.wire_bytes

    def _add_messages(self, coder: Coder, grad: Tensor, total: Tensor, inside: Transport) -> None:
        assert self._message is not None
        # [q, h] is for, then from, neighbour q, about host h's row. A neighbour gets its messages
        # for all hosts in one call of the backend.
        shape = (inside.size, len(total), self._message.row_words)
        send = self._setup.workspace.take("inside_send", shape, torch.int32)
        received = self._setup.workspace.take("inside_received", shape, torch.int32)
        if len(total) == 1:
            coder.encode_rows(grad, send[:, 0])
        else:
            # Gradients are in the order of hosts. Their messages are first written where those of
            # the neighbours will arrive.
            encoded = received.view(len(grad), -1)
            coder.encode_rows(grad, encoded)
            send.copy_(encoded.view(len(total), inside.size, -1).transpose(0, 1))
        work = inside.all_to_all(received.view(inside.size, -1), send.view(inside.size, -1))
        work.wait()
        self._counters.inside_bytes += work.wire_bytes
        coder.decode_sums(received.transpose(0, 1), total)

    def memory(self) -> Iterator[tuple[str, Codec]]:
        if self._coder is not None:
            yield from ((f"inside.{name}", codec) for name, codec in self._coder.codecs.items())

    def skip(self, steps: int) -> None:
        if self._coder is not None:
            self._coder.skip(steps)
