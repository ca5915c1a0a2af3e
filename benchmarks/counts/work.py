"""What is counted: an operator on one kind of input, and what it asks of the device.

A gradient has ``2**28`` elements in all: so many rows (destinations, or messages) of equal length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..compiled import Launch
from .language import Hint, Result

NUMEL = 1 << 28
# As policies have it.
BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Work:
    """One operator on one kind of input.

    Attributes:
        rows: destinations of a gradient, or messages that are added up.
        bits: of a code; 0 where there are none.
        density: share of the elements that a rank keeps.
        dithered: whether codes are rounded by chance.
    """

    op: str
    gradient: str = "bfloat16"
    residual: str | None = "bfloat16"
    rows: int = 8
    bits: int = 4
    block: int = BLOCK
    group: int = 1
    density: float | None = None
    symbol: str | None = None
    average: float = 0.0
    dithered: bool = False
    numel: int = NUMEL

    @property
    def name(self) -> str:
        """Such as ``quantize/bfloat16/bfloat16/8 rows/int4``."""
        parts = [self.op, self.gradient, self.residual or "none", f"{self.rows} rows"]
        if self.density is not None:
            parts.append(f"{100 * self.density:g}%")
        if self.symbol is not None:
            parts.append(self.symbol)
        elif self.bits:
            parts.append(f"int{self.bits}")
        if self.group > 1:
            parts.append(f"group {self.group}")
        if self.average:
            parts.append("average")
        if self.dithered:
            parts.append("dithered")
        if self.block != BLOCK:
            parts.append(f"block {self.block}")
        return "/".join(parts)


@dataclass(kw_only=True)
class Asked:
    """What an operator asks of the device.

    Attributes:
        launches: of kernels, in their order.
        torch: bytes that each of torch's own kernels moves.
        floor: bytes that any implementation moves.
        hints: see :class:`.language.Hint`; by the name of an argument, or by ``kernel.argument``.
        results: what is known of device functions, by ``kernel.function``.
        note: what is assumed of the input.
    """

    launches: list[Launch] = field(default_factory=list)
    torch: list[float] = field(default_factory=list)
    floor: float = 0.0
    hints: Mapping[str, Hint] = field(default_factory=dict)
    results: Mapping[str, Result] = field(default_factory=dict)
    note: str = ""
