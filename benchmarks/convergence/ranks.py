"""Data-parallel ranks, simulated in one process by the library's own codecs and feedback.

Every rank has the reducers that it would have in training, residuals and thresholds in them; only
the messages are carried by hand, from the rank that wrote them to the one that owns the shard.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tagc.codecs import Work
from tagc.codecs.workspace import Workspace
from tagc.comm import NoiseGauge, UnitReducer, noise_factor
from tagc.noise import Factors, exchange_is_due
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


class SimulatedRanks(Factors):
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

    def measure_noise(self) -> None:
        """Measure from now on how much larger gradients come out than densely."""
        for unit in self._units:
            unit.measure_noise()

    def agree(self) -> None:
        """See :meth:`tagc.noise.Factors.agree`."""
        for unit in self._units:
            unit.agree()

    def by_parameter(self) -> dict[int, float]:
        """See :meth:`tagc.noise.Factors.by_parameter`."""
        return {i: factor for unit in self._units for i, factor in unit.factors()}

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
        self._gauges: list[NoiseGauge] = []
        self._agreed, self._agreed_at = torch.zeros(0, 2, dtype=torch.float64), 0
        if plan is None or not plan.compressed:
            return
        if any(segment.codec.cells for segment in plan.segments):
            raise ValueError(
                "sketches are summed on the way, which is not simulated: 'packed' with 16 bits "
                "keeps the same elements"
            )
        ops = get_ops(device, "triton" if device.type == "cuda" else None)
        workspace = Workspace(device)
        self._reducers = [
            UnitReducer(plan, ops, device, workspace, seed, rank=rank) for rank in range(W)
        ]
        self._messages = torch.empty(W, W, plan.words, dtype=torch.int32, device=device)

    def measure_noise(self) -> None:
        if self._plan is not None:
            self._gauges = [NoiseGauge(self._plan, self._out.device) for _ in self._reducers]

    @property
    def _compressed_steps(self) -> int:
        return max(0, self._steps - (self._plan.warmup_steps if self._plan else 0))

    def agree(self) -> None:
        if self._gauges and exchange_is_due(self._compressed_steps, self._agreed_at):
            self._agreed = torch.stack([gauge.sums for gauge in self._gauges]).sum(0).cpu()
            self._agreed_at = self._compressed_steps

    def factors(self) -> Iterator[tuple[int, float]]:
        for segment, squares in zip(
            self._plan.compressed if self._plan else (), self._agreed, strict=False
        ):
            for p in self._slots.within(segment.start, segment.stop):
                yield id(p), noise_factor(squares)

    def take(self, rank: int) -> None:
        self._slots.gradients(self._grads[rank])

    def average(self) -> None:
        W = len(self._out)
        self._steps += 1
        if self._plan is None or not self._reducers or self._steps <= self._plan.warmup_steps:
            torch.mean(self._grads, 0, out=self._out)
        else:
            exchanges = [_ByHand(rank) for rank in range(W)]
            for rank, gauge in enumerate(self._gauges):
                gauge.look(self._grads[rank, rank], self._compressed_steps)
            for exchange, reducer, grads, sent in zip(
                exchanges, self._reducers, self._grads, self._messages, strict=True
            ):
                reducer.encode(grads, sent, exchange)
            for exchange, reducer in zip(exchanges, self._reducers, strict=True):
                owner = exchange.row
                reducer.decode(self._messages[:, owner], self._out[owner], exchange, W)
            for gauge, out in zip(self._gauges, self._out, strict=bool(self._gauges)):
                gauge.compare(out, self._compressed_steps, 1.0)
        self._slots.set_gradients(self._out)
