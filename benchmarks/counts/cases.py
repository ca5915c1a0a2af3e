"""Which operators are counted, on which inputs: what the shipped policies use, and a few steps to
the sides."""

from __future__ import annotations

from dataclasses import dataclass

# As policies have it.
BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operator on one kind of input.

    Attributes:
        rows: destinations of a gradient, or messages that are added up, of equal length.
        bits: of a code; 0 where there are none.
        density: share of the elements that a rank keeps.
        dithered: whether codes are rounded by chance.
        numel: elements of all rows.
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
    numel: int = 1 << 28

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


def _sparse(density: float) -> list[Case]:
    return [
        # packed.
        Case(op="pack", density=density, residual="float32"),
        Case(op="unpack", density=density),
        Case(op="unpack", density=density, rows=2),
        # attn-only, for up to 8 ranks.
        Case(op="encode", symbol="int8x4", density=density, residual="float32"),
        Case(op="decode", symbol="int8x4", rows=2, density=density, residual="float32"),
    ]


CASES = (
    # loco and hybrid: 4 bits, averaged; hosts: 4 bits with a residual; parameters have none.
    Case(op="quantize"),
    Case(op="quantize", average=0.8),
    Case(op="quantize", residual="float32"),
    Case(op="quantize", gradient="float32"),
    Case(op="quantize", bits=8, residual=None),
    Case(op="quantize", block=1024),
    # stateless.
    Case(op="quantize", block=32, residual=None, dithered=True),
    Case(op="dequantize"),
    Case(op="dequantize", rows=2),
    Case(op="dequantize", gradient="float32"),
    Case(op="dequantize", bits=8),
    # What owners do with a lead, as one-bit and its relatives have.
    Case(op="undo_lag", residual=None, rows=1, bits=0),
    # one-bit and two-bits, then half-bit.
    Case(op="quantize_matrix", bits=1),
    Case(op="quantize_matrix", bits=1, gradient="float32"),
    Case(op="quantize_matrix", bits=2),
    Case(op="quantize_matrix", bits=1, group=8),
    Case(op="dequantize_matrix", bits=1),
    Case(op="dequantize_matrix", bits=1, rows=2),
    Case(op="dequantize_matrix", bits=2),
    *_sparse(0.05),
    *_sparse(0.2),
    Case(op="pack", density=0.05),
    Case(op="pack", density=0.05, residual="float32", gradient="float32"),
    Case(op="encode", symbol="int8x4", density=0.05),
    Case(op="encode", symbol="int8x4", density=0.05, residual=None),
    Case(op="decode", symbol="int8x4", rows=8, density=0.01, residual="float32"),
    # A direct layout: all groups have cells of their own.
    Case(op="decode", symbol="int8x4", rows=8, density=0.2, residual="float32"),
    Case(op="select", density=0.05, residual=None),
    Case(op="insert", symbol="int8x4", density=0.05, residual=None, rows=1),
    Case(op="peel", symbol="int8x4", density=0.05, residual=None, rows=1),
)
