"""Data-parallel ranks, simulated in one process by the library's own codecs and feedback.

Every rank has the reducers that it would have in training, residuals and thresholds in them; only
the messages are carried by hand, from the rank that wrote them to the one that owns the shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tagc.codecs import Work
from tagc.codecs.workspace import Workspace
from tagc.comm import UnitReducer
from tagc.ops import get_ops
from tagc.plan import UnitInfo, UnitParam, UnitPlan, build_plan
from tagc.policy import Policy


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
        """Blocks of the model are units, and so is all that is in none, as with ``fully_shard``.

        Raises:
            ValueError: if the policy has sketches, whose sums are no messages.
        """
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        blocks: dict[str, dict[str, nn.Parameter]] = {}
        for name, p in parameters.items():
            head, _, rest = name.partition(".h.")
            block = f"{head}.h.{rest.partition('.')[0]}" if rest else ""
            blocks.setdefault(block, {})[name] = p
        infos = [_info(name, members, ranks) for name, members in blocks.items()]
        plans = build_plan(infos, policy).units if policy else [None] * len(infos)
        members = [list(block.values()) for block in blocks.values()]
        self._units = [
            _Unit(info, plan, params, seed)
            for seed, (info, plan, params) in enumerate(zip(infos, plans, members, strict=True))
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
    def __init__(
        self, info: UnitInfo, plan: UnitPlan | None, params: Sequence[nn.Parameter], seed: int
    ) -> None:
        device, W = params[0].device, info.world_size
        stops = torch.tensor([p.columns for p in info.params]).cumsum(0).tolist()
        self._slots = [
            (p, slice(stop - u.columns, stop))
            for p, u, stop in zip(params, info.params, stops, strict=True)
        ]
        self._grads = torch.zeros(W, W, stops[-1], device=device)  # [rank, owner, S]
        self._out = torch.zeros(W, stops[-1], device=device)
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
        for p, columns in self._slots:
            assert p.grad is not None
            if p.shape[0] % len(self._out) == 0:
                self._grads[rank, :, columns] = p.grad.view(len(self._out), -1)
            else:
                self._grads[rank, :, columns] = self._padded(p.grad)

    def _padded(self, t: Tensor) -> Tensor:
        rows = math.ceil(t.shape[0] / len(self._out)) * len(self._out)
        padded = t.new_zeros(rows, *t.shape[1:])
        padded[: len(t)] = t
        return padded.view(len(self._out), -1)

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
        for p, columns in self._slots:
            assert p.grad is not None
            whole = self._out[:, columns].reshape(-1)
            p.grad.copy_(whole[: p.numel()].view_as(p))


def _info(name: str, members: dict[str, nn.Parameter], ranks: int) -> UnitInfo:
    def columns(p: Any) -> int:
        return math.ceil(p.shape[0] / ranks) * math.prod(p.shape[1:])

    params = tuple(
        UnitParam(name=n, shape=tuple(p.shape), columns=columns(p)) for n, p in members.items()
    )
    return UnitInfo(name=name, params=params, world_size=ranks, dtype=torch.float32)
