"""An all-gather of messages that each describe a whole shard. Every gather sends them, or the
backward reuses those of its forward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.basics.profiled import profiled
from tagc.collect.alarm import Alarm
from tagc.collect.exchange import Broadcast
from tagc.collect.gatherer import GatherSetup, Phase, UnitGatherer, gather_coder, squared_norms
from tagc.collect.transport import failing_in
from tagc.plan import as_list


class MessageGatherer(UnitGatherer):
    """Encodes the shard again for every all-gather. See :class:`UnitGatherer`."""

    def __init__(self, setup: GatherSetup) -> None:
        super().__init__(setup)
        plan = self.plan
        self._coder = gather_coder(setup)
        self._changed = Alarm(
            f"tagc: the parameters of unit {self._name!r} changed between a forward and its "
            "backward (by an optimizer's step, or by loading weights). FSDP would gather them "
            "again, but with 'keep_for_backward' nothing is sent in backward: change parameters "
            "after the backward, or set 'keep_for_backward: false'"
        )
        self._unfit = {
            segment.start: Alarm(
                f"tagc: frozen parameters of unit {self._name!r} "
                f"({as_list([param.name for param in segment.params])}) hold values that "
                f"{segment.codec.name} cannot carry (not finite, or at the edge of "
                f"{plan.info.dtype}), but did not in tagc.wrap. Set them before tagc.wrap, which "
                "then gathers such parameters uncompressed; or wrap again now, after "
                "tagc.compressor(model).remove()"
            )
            for segment in plan.compressed
            if segment.frozen
        }
        # The messages of the last forward that autograd recorded, for its backward to read.
        self._forward_message: Tensor | None = None
        self._has_forward_message = False
        if plan.reuses_forward_message:
            shape = (plan.info.world_size, plan.messages.row_words)
            self._forward_message = torch.empty(shape, dtype=torch.int32, device=setup.device)

    def _gather(self, rows: Tensor, inp: Tensor, group: dist.ProcessGroup, phase: Phase) -> None:
        """See :meth:`UnitGatherer._gather`."""
        self._changed.check()
        for unfit in self._unfit.values():
            unfit.check()
        kept = self._forward_message
        reads_kept = phase is Phase.BACKWARD and self._has_forward_message
        if kept is not None and (reads_kept or phase is Phase.FORWARD):
            received = kept
        else:
            shape = (self.plan.info.world_size, self.plan.messages.row_words)
            received = self._workspace.take("parameters_recv", shape, torch.int32)
        # Compare before decoding, which overwrites `inp`: it is this rank's row of `rows`.
        changed = self._differs(inp, received[group.rank()]) if reads_kept else None
        if not reads_kept:
            exchange = self._broadcast(group)
            self._lockstep.announce(exchange.transports, self.plan.words)
            with failing_in(self._lockstep.what, group):
                self._exchange(received, inp, exchange)
        with profiled("decode parameters", self._name):
            self._decode(received, rows)
        if self._unfit and not reads_kept:
            self._check_frozen(received, rows)
        if changed is not None:
            # Gathering again is not possible: other ranks may not know that they have to.
            self._changed.note(changed, rows[:, :1])
        if phase is not Phase.OTHER:
            self._has_forward_message = kept is not None and phase is Phase.FORWARD

    def note_forward(self) -> None:
        """See :meth:`UnitGatherer.note_forward`."""
        # If parameters are still unsharded, after an evaluation or `unshard()`, this forward
        # gathers nothing. A kept message is then from an earlier forward, whose backward may never
        # have gathered. If this forward does gather, it keeps a new message.
        if self._last is not Phase.FORWARD:
            self._has_forward_message = False

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`UnitGatherer.load_state`. (A forward's message need not be saved: between two
        steps no backward still needs it, and the next forward gathers again.)"""
        super().load_state(state)
        self._has_forward_message = False

    def refresh(self) -> None:
        """See :meth:`UnitGatherer.refresh`. Every message already carries the whole shard."""

    def relative_error(self, shard: Tensor) -> tuple[float, float]:
        """See :meth:`UnitGatherer.relative_error`."""
        if not self.plan.compressed:
            return squared_norms(shard, shard)
        message = torch.empty(1, self.plan.words, dtype=torch.int32, device=shard.device)
        decoded = torch.empty(1, shard.numel(), dtype=shard.dtype, device=shard.device)
        self._encode(shard, message)
        self._decode(message, decoded)
        return squared_norms(decoded[0], shard)

    def _check_frozen(self, received: Tensor, rows: Tensor) -> None:
        """Sound the alarm if a frozen parameter holds values that its codec cannot carry. All ranks
        have the same messages, so all raise. (Trainable parameters come out NaN instead, as in a
        run that diverges natively.)"""
        for codec in self._coder.codecs.values():
            start = codec.parts[0].columns.start
            alarm = self._unfit.get(start)
            lost = None if alarm is None else codec.cannot_carry(received)
            if alarm is not None and lost is not None:
                alarm.note(lost, rows[:, start : start + 1])

    def _differs(self, inp: Tensor, message: Tensor) -> Tensor:
        """Whether ``inp`` ``[S]`` encodes to something else than ``message`` ``[words]``; boolean,
        ``[]``."""
        now = self._workspace.take(
            "parameters_send", (1, self.plan.messages.row_words), torch.int32
        )
        self._encode(inp, now)
        return self._coder.differ(now[0], message)

    def _exchange(self, received: Tensor, inp: Tensor, exchange: Broadcast) -> None:
        send = self._workspace.take(
            "parameters_send", (1, self.plan.messages.row_words), torch.int32
        )
        with profiled("encode parameters", self._name):
            self._encode(inp, send)
        with profiled("gather parameters", self._name):
            self._lockstep.confirm()
            self._send(exchange, received, send)

    def _encode(self, inp: Tensor, message: Tensor) -> None:
        """Encode ``inp`` ``[S]`` to ``message`` ``[1, words]``."""
        self._coder.encode_rows(inp[None], message)

    def _decode(self, received: Tensor, rows: Tensor) -> None:
        """Decode ``received`` ``[R, words]`` to ``rows`` ``[R, S]``."""
        self._coder.decode_rows(received, rows)
