"""Sizes of codec ``delta``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tagc.codecs.delta.config import DeltaConfig
from tagc.codecs.matrix.config import MatrixConfig
from tagc.codecs.matrix.plan import MatrixPlan, plan_matrix
from tagc.codecs.plan import CodecPlan, PlanRequest
from tagc.codecs.quantized.config import QuantizedParametersConfig
from tagc.codecs.quantized.plan import QuantizedPlan, plan_quantized

AT_A_TIME = 1 << 22
"""Elements of changes that are decoded at a time, in float32; a row at least."""


@dataclass(frozen=True, kw_only=True)
class DeltaPlan(CodecPlan):
    """How the changes of one segment travel.

    Attributes:
        code: of the changes.
    """

    code: QuantizedPlan | MatrixPlan

    @property
    def name(self) -> str:
        """With what the changes travel by."""
        return f"delta {self.code.name}"

    @property
    def of_changes(self) -> bool:
        """See :attr:`CodecPlan.of_changes`."""
        return True

    @property
    def nominal_bits(self) -> float | None:
        """See :attr:`CodecPlan.nominal_bits`."""
        return self.code.nominal_bits

    @property
    def words(self) -> int:
        """Those of the code."""
        return self.code.words

    def scratch_bytes(self, destinations: int, sources: int, *, reference: bool) -> int:
        """Those of the code."""
        return self.code.scratch_bytes(destinations, sources, reference=reference)

    def word_shares(self, columns: Sequence[float]) -> list[float]:
        """See :meth:`CodecPlan.word_shares`."""
        return self.code.word_shares(columns)


def plan_delta(config: DeltaConfig, request: PlanRequest) -> DeltaPlan:
    """The sizes of one segment."""
    if config.bits == 2:
        return DeltaPlan(code=plan_matrix(MatrixConfig(bits=2), request))
    code = QuantizedParametersConfig(bits=config.bits, block=config.block)
    dithered = config.rounding == "stochastic"
    plan = replace(plan_quantized(code, request), dithered=dithered, by_content=dithered)
    return DeltaPlan(code=plan)
