"""The first of two levels: what the ranks of a host add up before one message a host is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from tagc.codecs import CodecSetup, Coder
from tagc.codecs.state import MAX_COUNT
from tagc.comm.collectives import failing_in
from tagc.comm.exchanges import GroupExchange
from tagc.comm.part import Part
from tagc.comm.reduction_check import name_of
from tagc.comm.waiting import Waiting
from tagc.plan import UnitPlan


class HostSum:
    """One unit's sum inside the host, and the micro-batches that wait in it for the one that
    crosses to other hosts.

    Attributes:
        bytes: sent so far to ranks of the same host.
        coder: of the messages that ranks of a host send each other; None where they send the
            gradients as they are.
    """

    def __init__(self, unit: UnitPlan, setup: CodecSetup, waiting: Waiting) -> None:
        """New state.

        Args:
            setup: of what is sent to other hosts.
            waiting: for micro-batches that do not cross.
        """
        self._unit, self._message = unit.info.label, unit.inside
        self._warmup_steps = unit.warmup_steps
        self._waiting = waiting
        self._workspace = setup.workspace
        self._shape = (unit.peers, unit.info.ranks_per_host)
        self.bytes = 0
        self.coder: Coder | None = None
        if self._message is not None:
            hosts, ranks = self._shape
            inside = replace(setup, destinations=hosts * ranks, world_size=ranks, stage=3)
            self.coder = Coder(self._message.segments, inside)

    def skip(self, steps: int) -> None:
        """Go on as if so many sums had been made elsewhere."""
        if self.coder is not None:
            self.coder.skip(steps)

    def add(
        self,
        grad: Tensor,
        exchange: GroupExchange,
        what: str,
        *,
        step: int,
        crosses: bool,
        part: Part | None = None,
    ) -> Tensor:
        """The sum ``[H, S]`` of the host's ranks, and of the micro-batches that waited; it waits,
        too, unless it crosses.

        Args:
            grad: ``[W, S]``.
            what: is going on, for errors.
            step: reductions before this one: those of the warm-up are added up as they are.
            part: what the backward reached; what waits for other parameters goes on waiting.
        """
        with (
            failing_in(what, exchange.groups[0]),
            record_function(f"TAGC::add inside the host ({self._unit})"),
        ):
            if self.coder is not None and step >= self._warmup_steps:
                total = self._add_messages(self.coder, grad, exchange)
            else:
                total = exchange.add_inside(grad)
        self.bytes += exchange.inside_bytes
        if crosses:
            self._waiting.hand_over(total, part)
        else:
            self._waiting.add(total, part)
        return total

    def _add_messages(self, coder: Coder, grad: Tensor, exchange: GroupExchange) -> Tensor:
        assert self._message is not None
        (hosts, ranks), words = self._shape, self._message.row_words
        take = self._workspace.take
        messages = take("inside_send", (hosts * ranks, words), torch.int32)
        received = take("inside_received", (hosts, ranks, words), torch.int32)
        total = take("inside_sum", (hosts, grad.shape[1]), grad.dtype)
        coder.encode_rows(grad, messages)
        exchange.send_inside(received, messages)
        coder.decode_sums(received, total)
        return total

    def check_alike(self, op: dist.ReduceOp.RedOpType, ranks: int) -> None:
        """Raise RuntimeError if micro-batches wait for a reduction of another kind than this."""
        if self._waiting:
            raise RuntimeError(
                f"tagc: micro-batches of unit {self._unit!r} wait inside the host, but "
                f"now it is reduced with {name_of(op)} over {ranks} ranks; reduce all "
                "micro-batches of a step alike"
            )

    def state(self) -> dict[str, Tensor]:
        """Counters: between steps nothing waits."""
        return {"inside_bytes": torch.tensor(self.bytes, dtype=torch.int64, device="cpu")}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never has."""
        if not 0 <= int(state["inside_bytes"]) <= MAX_COUNT:
            raise ValueError("the count of bytes inside hosts is negative, or too large")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken."""
        self.bytes = int(state["inside_bytes"])
