"""The units of a model on simulated ranks, as ``fully_shard`` would make them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tagc.plan import UnitInfo, UnitParam


class Slots:
    """Where the parameters of a unit lie in its buffers ``[W, S]``."""

    def __init__(self, info: UnitInfo, params: Sequence[nn.Parameter]) -> None:
        stops = torch.tensor([p.columns for p in info.params]).cumsum(0).tolist()
        self.ranks, self.columns, self.device = info.world_size, stops[-1], params[0].device
        self._slots = [
            (p, slice(stop - u.columns, stop))
            for p, u, stop in zip(params, info.params, stops, strict=True)
        ]

    def within(self, start: int, stop: int) -> list[nn.Parameter]:
        """The parameters that lie in these columns."""
        return [p for p, at in self._slots if start <= at.start and at.stop <= stop]

    def gradients(self, out: Tensor) -> None:
        """Write ``.grad`` of all parameters to ``out`` ``[W, S]``."""
        for p, columns in self._slots:
            assert p.grad is not None
            out[:, columns] = self._rows(p.grad)

    def set_gradients(self, rows: Tensor) -> None:
        """The reverse."""
        for p, columns in self._slots:
            assert p.grad is not None
            p.grad.copy_(_whole(rows[:, columns], p))

    def weights(self) -> Tensor:
        """All parameters, ``[W, S]``."""
        return torch.cat([self._rows(p.detach()) for p, _ in self._slots], dim=1)

    @torch.no_grad()
    def replace_weights(self, rows: Tensor) -> list[Tensor]:
        """Write ``[W, S]`` to the parameters; what they were."""
        before = [p.detach().clone() for p, _ in self._slots]
        for p, columns in self._slots:
            p.copy_(_whole(rows[:, columns], p))
        return before

    @torch.no_grad()
    def restore_weights(self, before: Sequence[Tensor]) -> None:
        """What :meth:`replace_weights` returned."""
        for (p, _), value in zip(self._slots, before, strict=True):
            p.copy_(value)

    def _rows(self, t: Tensor) -> Tensor:
        """Padded, ``[W, columns]``."""
        rows = math.ceil(t.shape[0] / self.ranks) * self.ranks
        if rows != t.shape[0]:
            t = torch.cat([t, t.new_zeros(rows - t.shape[0], *t.shape[1:])])
        return t.reshape(self.ranks, -1)


def _whole(rows: Tensor, like: Tensor) -> Tensor:
    return rows.reshape(-1)[: like.numel()].view_as(like)


@dataclass(frozen=True)
class Unit:
    """A block of the model, or what is in none."""

    info: UnitInfo
    slots: Slots


def units_of(model: nn.Module, ranks: int) -> list[Unit]:
    """Blocks of the model are units, and so is all that is in none."""
    blocks: dict[str, dict[str, nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            head, _, rest = name.partition(".h.")
            block = f"{head}.h.{rest.partition('.')[0]}" if rest else ""
            blocks.setdefault(block, {})[name] = p
    units = []
    for name, members in blocks.items():
        info = UnitInfo(
            name=name,
            params=tuple(_param(n, p, ranks) for n, p in members.items()),
            world_size=ranks,
            dtype=torch.float32,
        )
        units.append(Unit(info, Slots(info, list(members.values()))))
    return units


def _param(name: str, p: Tensor, ranks: int) -> UnitParam:
    columns = math.ceil(p.shape[0] / ranks) * math.prod(p.shape[1:])
    return UnitParam(name=name, shape=tuple(p.shape), columns=columns)
