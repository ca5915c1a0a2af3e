"""The first of two levels: what the ranks of a host add up before one message a host is sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from tagc.codecs.state import MAX_COUNT
from tagc.comm.collectives import failing_in
from tagc.comm.exchanges import GroupExchange
from tagc.comm.reduction_check import name_of


class HostSum:
    """One unit's sum inside the host, and the micro-batches that wait in it for the one that
    crosses to other hosts.

    Attributes:
        bytes: sent so far to ranks of the same host.
    """

    def __init__(self, unit: str, remedy: str) -> None:
        """Nothing waits.

        Args:
            unit: its name, for people.
            remedy: what to do about parameters without a gradient.
        """
        self._unit, self._remedy = unit, remedy
        self._waiting: Tensor | None = None
        self.bytes = 0

    def add(self, grad: Tensor, exchange: GroupExchange, what: str, *, crosses: bool) -> Tensor:
        """The sum ``[H, S]`` of the host's ranks, and of the micro-batches that waited; it waits,
        too, unless it crosses.

        Args:
            grad: ``[W, S]``.
            what: is going on, for errors.
        """
        with (
            failing_in(what, exchange.groups[0]),
            record_function(f"TAGC::add inside the host ({self._unit})"),
        ):
            total = exchange.add_inside(grad)
        self.bytes += exchange.inside_bytes
        if self._waiting is not None:
            if self._waiting.shape != total.shape:
                raise RuntimeError(
                    f"tagc: unit {self._unit!r} has {total.shape[1]} gradient columns per rank, "
                    f"but {self._waiting.shape[1]} in micro-batches of this step before: "
                    f"{self._remedy or 'let every parameter take part in all of them'}"
                )
            # In float32 whatever FSDP reduces: there may be many of them.
            self._waiting.add_(total)
            if crosses:
                total.copy_(self._waiting)
        elif not crosses:
            self._waiting = total.to(torch.float32, copy=True)
        if crosses:
            self._waiting = None
        return total

    def check_alike(self, op: dist.ReduceOp.RedOpType, ranks: int) -> None:
        """Raise RuntimeError if micro-batches wait for a reduction of another kind than this."""
        if self._waiting is not None:
            raise RuntimeError(
                f"tagc: micro-batches of unit {self._unit!r} wait inside the host, but "
                f"now it is reduced with {name_of(op)} over {ranks} ranks; reduce all "
                "micro-batches of a step alike"
            )

    def check_between_steps(self) -> None:
        """Raise RuntimeError if the gradient of a micro-batch waits, which no state has."""
        if self._waiting is not None:
            raise RuntimeError(
                f"tagc: unit {self._unit!r} holds gradients of micro-batches that have not left "
                "the host (set_requires_all_reduce(False)), which no state has; save after the "
                "optimizer's step, or call tagc.compressor(model).drop_waiting()"
            )

    def drop(self) -> None:
        """Forget what waits."""
        self._waiting = None

    def state(self) -> dict[str, Tensor]:
        """Counters: between steps nothing waits."""
        return {"inside_bytes": torch.tensor(self.bytes, dtype=torch.int64)}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never has."""
        if not 0 <= int(state["inside_bytes"]) <= MAX_COUNT:
            raise ValueError("the count of bytes inside hosts is negative, or too large")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken."""
        self.bytes = int(state["inside_bytes"])
