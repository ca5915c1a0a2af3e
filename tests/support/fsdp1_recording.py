"""Record the inputs and outputs of FSDP1's units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tagc.collect import UnitReducer
from tagc.collect.flat import FlatRows


@contextmanager
def recorded() -> Iterator[list[tuple[UnitReducer, Tensor, Tensor, Tensor, Tensor]]]:
    """Records the units' inputs and outputs, in FSDP's columns and in the plan's."""
    calls: list[tuple[UnitReducer, Tensor, Tensor, Tensor, Tensor]] = []
    reduce, take, give = UnitReducer.reduce, FlatRows.arrange, FlatRows.restore
    inside: list[Tensor] = []

    def recorded_reduce(self: UnitReducer, out: Tensor, inp: Tensor, *rest: Any) -> None:
        before = inp.clone()
        inside.clear()
        reduce(self, out.fill_(torch.nan), inp, *rest)
        rows, shard = inside or (before, out.clone())
        calls.append((self, before, out.clone(), rows, shard))

    def recorded_take(self: FlatRows, grad: Tensor) -> Tensor:
        workspace = self._workspace.take("flat_grad", (len(grad), self._columns), grad.dtype)
        workspace.fill_(torch.nan)
        rows = take(self, grad)
        inside.append(rows.clone())
        return rows

    def recorded_give(self: FlatRows, shard: Tensor, out: Tensor, row: int) -> None:
        inside.append(shard.clone())
        give(self, shard, out, row)

    with (
        patch.object(UnitReducer, "reduce", recorded_reduce),
        patch.object(FlatRows, "arrange", recorded_take),
        patch.object(FlatRows, "restore", recorded_give),
    ):
        yield calls
