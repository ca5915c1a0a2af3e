"""Data-parallel ranks, simulated in one process by the library's own codecs and feedback.

Every rank has the reducers that it would have in training, residuals and thresholds in them; only
the messages are carried by hand, from the rank that wrote them to the one that owns the shard.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tagc.codecs import Work
from tagc.codecs.workspace import Workspace
from tagc.comm import UnitReducer
from tagc.ops import get_ops
from tagc.plan import UnitPlan, build_plan
from tagc.policy import Policy

from .units import Unit, units_of


class _ByHand:
    """An exchange (:class:`tagc.codecs.Exchange`) whose messages somebody else carries."""

    def __init__(self, rank: int) -> None:
        self.row = rank
        self.takes_leftovers = True
        self.wire_bytes = 0

    def add_inside(self, grad: Tensor) -> Tensor:
        return grad

    def send(self, received: Tensor, message: Tensor) -> Work:
        raise NotImplementedError("messages are carried by hand")

    def sum_cells(self, cells: Tensor) -> tuple[Work, Tensor]:
        raise NotImplementedError("sums on the way are not simulated")

    def sum_counts(self, counts: Tensor) -> Work:
        raise NotImplementedError("sums on the way are not simulated")

    def gather(self, values: Tensor) -> Tensor:
        raise NotImplementedError("sums on the way are not simulated")


class SimulatedRanks:
    """Gradients of several ranks at the same weights, reduced as a policy says.

    Attributes:
        compressed_bits, compressed: bits of the messages to one owner, and elements of its shard,
            for the columns that the policy compresses.
        warmup_steps: reductions that go dense first.
    """

    def __init__(self, model: nn.Module, policy: Policy | None, ranks: int) -> None:
        """Ranks with a model each, of units as :func:`units_of` finds them.

        Raises:
            ValueError: if the policy has sketches, whose sums are no messages.
        """
        units = units_of(model, ranks)
        infos = [unit.info for unit in units]
        plans = build_plan(infos, policy, gathers=infos).units if policy else [None] * len(infos)
        self._units = [
            _Unit(unit, plan, seed)
            for seed, (unit, plan) in enumerate(zip(units, plans, strict=True))
        ]
        planned = [plan for plan in plans if plan is not None]
        segments = [s for plan in planned for s in plan.compressed]
        self.compressed_bits = 32 * sum(s.codec.words for s in segments)
        self.compressed = sum(s.columns for s in segments)
        self.warmup_steps = max((plan.warmup_steps for plan in planned), default=0)

    def take(self, rank: int) -> None:
        """The gradients that the model has now are those of this rank."""
        for unit in self._units:
            unit.take(rank)

    def average(self) -> None:
        """Give the model the gradients that all ranks would have after their reduce-scatters."""
        for unit in self._units:
            unit.average()


class _Unit:
    def __init__(self, unit: Unit, plan: UnitPlan | None, seed: int) -> None:
        self._slots = slots = unit.slots
        device, W = slots.device, slots.ranks
        self._grads = torch.zeros(W, W, slots.columns, device=device)  # [rank, owner, S]
        self._out = torch.zeros(W, slots.columns, device=device)
        self._steps, self._plan, self._reducers = 0, plan, []
        if plan is None or not plan.compressed:
            return
        if any(segment.codec.cells for segment in plan.segments):
            raise ValueError(
                "sketches are summed on the way, which is not simulated: 'packed' with 16 bits "
                "keeps the same elements"
            )
        ops = get_ops(device, "triton" if device.type == "cuda" else None)
        workspace = Workspace(device)
        self._reducers = [UnitReducer(plan, ops, device, workspace, seed) for _ in range(W)]
        self._messages = torch.empty(W, W, plan.words, dtype=torch.int32, device=device)

    def take(self, rank: int) -> None:
        self._slots.gradients(self._grads[rank])

    def average(self) -> None:
        W = len(self._out)
        self._steps += 1
        if self._plan is None or not self._reducers or self._steps <= self._plan.warmup_steps:
            torch.mean(self._grads, 0, out=self._out)
            for reducer, out in zip(self._reducers, self._out, strict=False):
                reducer.after_dense(out)
        else:
            exchanges = [_ByHand(rank) for rank in range(W)]
            for exchange, reducer, grads, sent in zip(
                exchanges, self._reducers, self._grads, self._messages, strict=True
            ):
                reducer.encode(grads, sent, exchange)
            for exchange, reducer in zip(exchanges, self._reducers, strict=True):
                owner = exchange.row
                reducer.decode(self._messages[:, owner], self._out[owner], exchange, W)
        self._slots.set_gradients(self._out)
