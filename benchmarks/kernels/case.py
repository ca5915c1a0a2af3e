"""A case: one operator on one input."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operator on one input.

    Attributes:
        op: a name in the registry.
        numel: elements of the gradient of one destination.
        gradient: dtype of the gradient.
        residual, density, symbol, bits, code: dtype of the residual, fraction kept, symbol, bits
            of a quantized element, code of a matrix (a key of ``CODES``); None where the operator
            has no such thing.
    """

    op: str
    numel: int
    gradient: str = "float32"
    residual: str | None = None
    density: float | None = None
    symbol: str | None = None
    bits: int | None = None
    code: str | None = None

    @property
    def name(self) -> str:
        """What ``--filter`` matches, such as ``encode/2^22/float32/float32/5%/int8x4``."""
        exponent = self.numel.bit_length() - 1
        parts = [
            self.op,
            f"2^{exponent}" if self.numel == 1 << exponent else str(self.numel),
            self.gradient,
            self.residual,
            None if self.density is None else f"{100 * self.density:g}%",
            self.symbol,
            None if self.bits is None else f"int{self.bits}",
            self.code,
        ]
        return "/".join(part for part in parts if part is not None)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """dtype of the gradient."""
        return getattr(torch, self.gradient)

    @property
    def residual_dtype(self) -> torch.dtype:
        """dtype of the residual, which the case must have."""
        assert self.residual is not None
        return getattr(torch, self.residual)
