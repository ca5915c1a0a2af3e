"""Record the inputs and outputs of FSDP1's units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tagc.collect import UnitReducer
from tagc.ops.launches import Pieces


@contextmanager
def recorded() -> Iterator[list[tuple[UnitReducer, Tensor, Tensor, Tensor, Tensor]]]:
    """Records the units' inputs and outputs, in FSDP's columns and in the plan's."""
    calls: list[tuple[UnitReducer, Tensor, Tensor, Tensor, Tensor]] = []
    reduce, bound = UnitReducer.reduce, Pieces.bound
    inside: list[Tensor] = []

    def recorded_reduce(self: UnitReducer, out: Tensor, inp: Tensor, *rest: Any) -> None:
        before = inp.clone()
        inside.clear()
        reduce(self, out.fill_(torch.nan), inp, *rest)
        rows, shard = inside or (before, out.clone())
        calls.append((self, before, out.clone(), rows, shard))

    def recorded_pieces(self: Pieces, ops: Any, own: int) -> Any:
        move = bound(self, ops, own)

        def moved(x: Tensor, y: Tensor) -> None:
            if not self.back:
                y.fill_(torch.nan)
            move(x, y)
            inside.append((x[0] if self.back else y).clone())

        return moved

    with (
        patch.object(UnitReducer, "reduce", recorded_reduce),
        patch.object(Pieces, "bound", recorded_pieces),
    ):
        yield calls
