"""Checks of every collective: it fits the unit's plan, and all ranks are at the same one.

If the backend has messages (gloo on a CPU), ranks exchange headers with their own tag before they
send anything else, and all ranks in a mix-up raise. Headers are in flight while a message is
encoded. On other backends (NCCL) a rank whose neighbours are in another collective hangs, or takes
what it receives. There, two words after each message identify its collective, and are compared on
the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.collect.transport import CollectiveWork, Transport, failing_in
from tagc.plan import Direction, UnitPlan, as_list
from tagc.plan.part import Part
from tagc.plan.unit_plan import COLLECTIVES

# A header is int64: step, words of a message, part of the unit, the end of the unit's name, calls.
_NUMBERS, _NAME_BYTES = 3, 48
_REMEDY = (
    "Every rank must run the same units in the same order, forward and backward: look for a unit, "
    "a micro-batch or a whole step that some ranks leave out, for parameters that only some of "
    "them use, or for a refresh() that only some of them call"
)
_SAME_CALLS = (
    "Since tagc.wrap or the last load, ranks called scale_residuals, restore_residuals or "
    "drop_waiting at different times or with different values: call them on every rank alike, "
    "between the same two steps"
)


class DesyncError(RuntimeError):
    """Ranks are at different collectives."""


class Lockstep:
    """Compares the ranks' positions among the collectives of one unit in one direction, which
    errors call ``what``."""

    def __init__(self, direction: Direction, label: str, device: torch.device) -> None:
        self.what = f"{COLLECTIVES[direction]} of unit {label!r}"
        self.label = label
        self._device, self._count = device, 0
        name = direction[:1].encode() + label.encode()[1 - _NAME_BYTES :]
        self._name = torch.frombuffer(bytearray(name.ljust(_NAME_BYTES, b"\0")), dtype=torch.int64)
        self._mark = zlib.crc32(f"{direction} {label}".encode()) % 2**31
        self._pending: list[tuple[Transport, CollectiveWork, Tensor, Tensor]] = []
        self._calls = 0

    @property
    def mix_up(self) -> str:
        """What differing stamps mean."""
        return (
            f"tagc: {self.what} got a message of another unit, direction or step, or from a rank "
            f"with other calls. {_REMEDY}. {_SAME_CALLS}"
        )

    def note(self, call: str) -> None:
        """Note a call that all ranks must make before the same collective, where they compare
        their calls; so the call itself need not wait for the others."""
        # As part of a stamp it is an int32.
        self._calls = zlib.crc32(call.encode(), self._calls) % 2**31

    def forget(self) -> None:
        """Forget all calls: the state is new, or was loaded."""
        self._calls = 0

    def check(self, transport: Transport, words: int, step: int | None = None) -> None:
        """:meth:`announce` and :meth:`confirm` at once, for a collective that encodes nothing."""
        self.announce([transport], words, step)
        self.confirm()

    def announce(
        self,
        transports: Sequence[Transport],
        words: int,
        step: int | None = None,
        part: int = 0,
    ) -> None:
        """Start telling the other ranks which collective this rank is at.

        Args:
            words: words of the message to a rank.
            step: the number of collectives before; by default counted here.
            part: a number for the part of the unit's parameters; 0 for all.
        """
        step, self._count = self._count if step is None else step, self._count + 1
        self._pending.clear()
        for transport in transports:
            if transport.by_messages(self._device):
                numbers = torch.tensor(
                    [step, words, part, self._calls], dtype=torch.int64, device="cpu"
                )
                mine = torch.cat((numbers[:_NUMBERS], self._name, numbers[_NUMBERS:]))
                with failing_in(self.what, transport.group):
                    self._pending.append((transport, *transport.gather_headers(mine), mine))

    def confirm(self) -> None:
        """Wait for the headers of the others, if any are still in flight, and compare them.

        Raises:
            DesyncError: if another rank is at another collective.
            RuntimeError: if another rank does not answer in time.
        """
        while self._pending:
            transport, work, headers, mine = self._pending.pop()
            with failing_in(self.what, transport.group):
                work.wait()
            others = (headers != mine).any(1).nonzero().flatten().tolist()
            if others:
                other = headers[others[0]]
                us = f"rank {transport.rank} of {transport.size}"
                if torch.equal(other[:-1], mine[:-1]):
                    raise DesyncError(
                        f"tagc: {self.what}, {us} and rank {others[0]}: {_SAME_CALLS}"
                    )
                raise DesyncError(
                    f"tagc: ranks are at different collectives: {us} at {_described(mine)}, "
                    f"rank {others[0]} at {_described(other)}. {_REMEDY}"
                )

    def stamp(self, part: int = 0) -> int:
        """The first word of stamps, int32, after which their collectives are counted."""
        return self._mark ^ part ^ self._calls


def _described(header: Tensor) -> str:
    step, length, part = header[:_NUMBERS].tolist()
    name = header[_NUMBERS : _NUMBERS + _NAME_BYTES // 8]
    name = bytes(name.view(torch.uint8).tolist()).rstrip(b"\0")
    kinds = {direction[:1]: words for direction, words in COLLECTIVES.items()}
    kind = kinds.get(name[:1].decode(errors="replace"), "another collective")
    label = name[1:].decode(errors="replace")
    cut = "..." if len(name) == _NAME_BYTES else ""
    reached = f", some of its parameters only: {part:08x}" if part else ""
    return f"{kind} of unit '{cut}{label}' (step {step}, {length} words{reached})"


def check_reduction(
    plan: UnitPlan,
    part: Part | None,
    out: Tensor,
    inp: Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType,
) -> None:
    """Raise RuntimeError if the plan was not made for these buffers, this group or this operation.

    Args:
        part: the part that the backward reached; None for all parameters of the unit.
    """
    info, name = plan.info, plan.info.label
    columns = plan.buffer_columns if part is None else part.columns
    unknown = sorted(part.names - {p.name for p in info.params}) if part is not None else []
    if group.size() != info.world_size:
        raise RuntimeError(
            f"tagc: unit {name!r} was planned for {info.world_size} ranks, but FSDP "
            f"reduces over {group.size()}; call tagc.wrap after the model is sharded for good"
        )
    expected = columns * plan.received_rows, columns * plan.rows
    if unknown or (out.numel(), inp.numel()) != expected:
        more = f", {as_list(unknown)} among them" if unknown else ""
        raise RuntimeError(
            f"tagc: unit {name!r} was planned for {columns} gradient columns per rank, but FSDP "
            f"reduces {out.numel()}{more}: requires_grad or the sharding changed after tagc.wrap. "
            "Unfreeze and shard parameters before tagc.wrap, or remove() it and wrap again"
        )
    if inp.dtype != info.dtype:
        raise RuntimeError(
            f"tagc: unit {name!r} was planned for gradients of {info.dtype}, but FSDP "
            f"reduces {inp.dtype}; call tagc.wrap after the model's dtypes are set for good"
        )
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise RuntimeError(
            f"tagc: unit {name!r} is reduced with {_name_of(op)}, but only SUM and AVG "
            "can be compressed; with a gradient divide factor, also call "
            "set_force_sum_reduction_for_comms(True) on the FSDP modules"
        )


def refuse_others(plan: UnitPlan, op: dist.ReduceOp.RedOpType, ranks: int) -> None:
    """Raise because micro-batches wait inside the host, and this reduction cannot include them."""
    raise RuntimeError(
        f"tagc: micro-batches of unit {plan.info.label!r} wait inside the host, but now it is "
        f"reduced with {_name_of(op)} over {ranks} ranks; reduce all micro-batches of a step alike"
    )


def _name_of(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> str:
    # An operation with a factor has no name of its own.
    kinds = dist.ReduceOp.RedOpType.__members__.items()
    return next((name for name, kind in kinds if op == kind), str(op))
