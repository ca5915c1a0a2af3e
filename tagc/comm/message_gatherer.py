"""An all-gather of messages: each says all of a shard, and is sent every time, or kept from the
forward for the backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from tagc.comm.alarm import Alarm
from tagc.comm.collectives import failing_in
from tagc.comm.exchanges import BroadcastExchange
from tagc.comm.gatherer import GatherSetup, Phase, UnitGatherer
from tagc.comm.segment_codecs import SegmentCodecs


class MessageGatherer(UnitGatherer):
    """Encodes the shard anew for every all-gather. See :class:`UnitGatherer`."""

    def __init__(self, setup: GatherSetup) -> None:
        super().__init__(setup)
        plan = self.plan
        self._codecs = SegmentCodecs(setup)
        self._changed = Alarm(
            f"tagc: the parameters of unit {self._name!r} are others in a backward than in its "
            "forward (an optimizer's step, or weights loaded in between). FSDP would gather them "
            "again, but with 'keep_for_backward' nothing is sent in backward: change parameters "
            "after the backward, or set 'keep_for_backward: false'"
        )
        # The message of the last forward with a backward to come, while that has not read it.
        self._forward_message: Tensor | None = None
        self._has_forward_message = False
        if plan.reuses_forward_message:
            shape = (plan.info.world_size, plan.words)
            self._forward_message = torch.empty(shape, dtype=torch.int32, device=setup.device)

    def _gather(self, rows: Tensor, inp: Tensor, group: dist.ProcessGroup, phase: Phase) -> None:
        """See :meth:`UnitGatherer._gather`."""
        self._changed.check()
        kept = self._forward_message
        reads_kept = phase is Phase.BACKWARD and self._has_forward_message
        if kept is not None and (reads_kept or phase is Phase.FORWARD):
            received = kept
        else:
            shape = (self.plan.info.world_size, self.plan.words)
            received = self._workspace.take("parameters_recv", shape, torch.int32)
        # Before anything is decoded: `inp` is this rank's row of `rows`.
        changed = self._differs(inp, received[group.rank()]) if reads_kept else None
        if not reads_kept:
            exchange = self._connect(group)
            self._lockstep.announce(exchange.groups, self.plan.words)
            with failing_in(self._lockstep.what, group):
                self._exchange(received, inp, exchange)
        with record_function(f"TAGC::decode parameters ({self._name})"):
            self._decode(received, rows)
        if changed is not None:
            # To gather anew is no way out: other ranks may not know that they have to.
            self._changed.note(changed, rows[:, :1])
        if phase is not Phase.OTHER:
            self._has_forward_message = kept is not None and phase is Phase.FORWARD

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`UnitGatherer.load_state`. (The forward's message needs no saving: between two
        steps no backward still waits for it, and the next forward gathers anew.)"""
        super().load_state(state)
        self._has_forward_message = False

    def refresh(self) -> None:
        """See :meth:`UnitGatherer.refresh`: every message says all."""

    def relative_error(self, shard: Tensor) -> tuple[float, float]:
        """See :meth:`UnitGatherer.relative_error`."""
        if not self.plan.compressed:
            return 0.0, shard.double().square().sum().item()
        message = torch.empty(1, self.plan.words, dtype=torch.int32, device=shard.device)
        decoded = torch.empty(1, shard.numel(), dtype=shard.dtype, device=shard.device)
        self._encode(shard, message)
        self._decode(message, decoded)
        wide = shard.double()
        return (decoded[0].double() - wide).square().sum().item(), wide.square().sum().item()

    def _differs(self, inp: Tensor, message: Tensor) -> Tensor:
        """Whether ``inp`` ``[S]`` has another message than ``[words]``; boolean, ``[]``."""
        now = self._workspace.take("parameters_send", (1, self.plan.words), torch.int32)
        self._encode(inp, now)
        return (now[0] != message).any()

    def _exchange(self, received: Tensor, inp: Tensor, exchange: BroadcastExchange) -> None:
        send = self._workspace.take("parameters_send", (1, self.plan.words), torch.int32)
        with record_function(f"TAGC::encode parameters ({self._name})"):
            self._encode(inp, send)
        with record_function(f"TAGC::gather parameters ({self._name})"):
            self._lockstep.confirm()
            self._send(exchange, received, send)

    def _encode(self, inp: Tensor, message: Tensor) -> None:
        """``[S]`` to ``[1, words]``."""
        for _, codec, words in self._codecs.of(message):
            codec.encode_rows(inp[None], words)

    def _decode(self, received: Tensor, rows: Tensor) -> None:
        """``[R, words]`` to ``[R, S]``."""
        for _, codec, words in self._codecs.of(received):
            codec.decode_rows(words, rows)
