"""Codec ``delta``: changes of parameters since the last message, in few bits.

All ranks that decode, including the owner of a shard, have a copy of the parameters as of the last
message, and add the decoded changes to it. The copy lacks what quantization left out, so the next
change includes it: this is error feedback without a residual.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import model_validator

from tagc.codecs.config import Block, CodecConfig, Special, unit
from tagc.codecs.matrix import MatrixConfig, MatrixPlan, plan_matrix
from tagc.codecs.plan import PlanRequest
from tagc.codecs.quantized import (
    QuantizedParametersConfig,
    QuantizedPlan,
    plan_quantized,
)


class DeltaConfig(CodecConfig):
    """Changes of parameters since the last message, in `bits`, in FSDP's all-gather.

    The ranks of a host share a copy of the unit's parameters, which holds what all other ranks know
    of them. Messages are sent once for every step of the optimizer, in the first forward after it.
    Nothing else leaves a host. 8 and 4 bits have a scale for every `block` elements. 2 bits have
    scales of rows and columns, like the codec `matrix`, and no code for zero.
    """

    kind: Literal["delta"] = "delta"
    """The codec's name."""
    bits: Annotated[Literal[2, 4, 8], unit("bits per element")] = 4
    """Size of an element's code."""
    block: Block = 256
    """How many neighbouring elements share a scale of 16 bits; with 8 and 4 bits only."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest code, or randomly up or down, so that a change smaller than half a code
    sometimes reaches the copy at once, not only after changes add up; with 8 and 4 bits only."""

    @model_validator(mode="after")
    def _check_rounding(self) -> Self:
        if self.rounding == "stochastic" and self.needs_matrices:
            raise ValueError(f"rounding 'stochastic' needs bits 4 or 8, not {self.bits}")
        return self

    def carries(self, special: Special) -> bool:
        """See :meth:`CodecConfig.carries`: they are sent whole once, and do not change."""
        return True

    @property
    def needs_matrices(self) -> bool:
        return self.bits < 4

    @property
    def description(self) -> str:
        return f"codec 'delta' with bits {self.bits}"

    @property
    def for_vectors(self) -> str:
        return "bits 4 or 8, or codec 'dense'"


def plan_delta(config: DeltaConfig, request: PlanRequest) -> QuantizedPlan | MatrixPlan:
    """The plan of the codec that quantizes the changes of one segment."""
    if config.bits == 2:
        return replace(plan_matrix(MatrixConfig(bits=2), request), of_changes=True)
    code = QuantizedParametersConfig(bits=config.bits, block=config.block)
    plan = plan_quantized(code, request)
    return replace(plan, of_changes=True, dithered=config.rounding == "stochastic")
