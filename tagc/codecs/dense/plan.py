"""Sizes of codec ``dense``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from tagc.codecs.dense.config import DenseConfig
from tagc.codecs.plan import CodecPlan, Cut, PlanRequest


@dataclass(frozen=True, kw_only=True)
class DensePlan(CodecPlan):
    """Elements as they are, or rounded to the wire's dtype."""

    numel: int
    wire: torch.dtype
    native: bool = True

    @property
    def name(self) -> str:
        """'dense', with the dtype where it is not the gradient's."""
        return "dense" if self.native else f"dense {str(self.wire).removeprefix('torch.')}"

    @property
    def compressed(self) -> bool:
        """See :attr:`CodecPlan.compressed`."""
        return not self.native

    @property
    def words(self) -> int:
        """Elements of 2 bytes share words."""
        return -(-self.numel * self.wire.itemsize // 4)

    def scratch_bytes(self, destinations: int, sources: int, *, reference: bool) -> int:
        """See :meth:`CodecPlan.scratch_bytes`: the sum in float32, and its average."""
        return 2 * max(4, self.wire.itemsize) * self.numel

    def widened_bytes(self, sources: int) -> int:
        """See :meth:`CodecPlan.widened_bytes`."""
        return 4 * sources * self.numel if self.wire.itemsize < 4 else 0

    def sums_bytes(self, rows: int, ranks: int, *, reference: bool) -> int:
        """See :meth:`CodecPlan.sums_bytes`: the sums in float32, beside what torch widens."""
        return max(4, self.wire.itemsize) * rows * self.numel + self.widened_bytes(rows * ranks)

    def cut(self, owners: int) -> tuple[Self, tuple[Cut, ...]]:
        """See :meth:`CodecPlan.cut`: anywhere."""
        length = -(-self.numel // owners)
        return replace(self, numel=length), (Cut(columns=self.numel, length=length),)

    def used_words(self, columns: int) -> int:
        """Those of the elements that are filled."""
        return replace(self, numel=columns).words


def plan_dense(config: DenseConfig, request: PlanRequest) -> DensePlan:
    """The sizes of what travels as it is, or as bfloat16."""
    native = request.columns == 0 or not config.compresses
    wire = request.dtype if native else torch.bfloat16
    return DensePlan(numel=request.columns, wire=wire, native=native)


def plan_empty(request: PlanRequest) -> DensePlan:
    """A segment without columns, whatever its codec."""
    return DensePlan(numel=0, wire=request.dtype)
