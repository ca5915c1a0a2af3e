"""Which operators are counted: what the shipped policies use, and a few steps to the sides."""

from __future__ import annotations

from .work import Work

_SPARSE = [(0.05, "float32"), (0.2, "float32")]


def variants() -> list[Work]:
    """All of them; the first one of each operator is the one that a quick count takes."""
    found = [
        # loco and hybrid: 4 bits, averaged; hosts: 4 bits with a residual; parameters have none.
        Work(op="quantize"),
        Work(op="quantize", average=0.8),
        Work(op="quantize", residual="float32"),
        Work(op="quantize", gradient="float32"),
        Work(op="quantize", bits=8, residual=None),
        Work(op="quantize", block=1024),
        # stateless.
        Work(op="quantize", block=32, residual=None, dithered=True),
        Work(op="dequantize"),
        Work(op="dequantize", rows=2),
        Work(op="dequantize", gradient="float32"),
        Work(op="dequantize", bits=8),
        # What owners do with a lead, as one-bit and its relatives have.
        Work(op="undo_lag", residual=None, rows=1, bits=0),
        # one-bit and two-bits, then half-bit.
        Work(op="quantize_matrix", bits=1),
        Work(op="quantize_matrix", bits=1, gradient="float32"),
        Work(op="quantize_matrix", bits=2),
        Work(op="quantize_matrix", bits=1, group=8),
        Work(op="dequantize_matrix", bits=1),
        Work(op="dequantize_matrix", bits=1, rows=2),
        Work(op="dequantize_matrix", bits=2),
    ]
    for density, residual in _SPARSE:
        sparse = {"density": density, "residual": residual}
        found += [
            # packed.
            Work(op="pack", **sparse),
            Work(op="unpack", density=density),
            Work(op="unpack", density=density, rows=2),
            # attn-only and non-attn, for up to 8 ranks.
            Work(op="encode", symbol="int8x4", **sparse),
            Work(op="decode", symbol="int8x4", rows=2, **sparse),
        ]
    found += [
        Work(op="pack", density=0.05, residual="bfloat16"),
        Work(op="pack", density=0.05, residual="float32", gradient="float32"),
        Work(op="encode", symbol="int8x4", density=0.05, residual="bfloat16"),
        Work(op="encode", symbol="int8x4", density=0.05, residual=None),
        Work(op="decode", symbol="int8x4", rows=8, density=0.01, residual="float32"),
        # A direct layout: all groups have cells of their own.
        Work(op="decode", symbol="int8x4", rows=8, density=0.2, residual="float32"),
        Work(op="select", density=0.05, residual=None),
        Work(op="insert", symbol="int8x4", density=0.05, residual=None, rows=1),
        Work(op="peel", symbol="int8x4", density=0.05, residual=None, rows=1),
    ]
    return found


def quick() -> list[Work]:
    """One of each operator."""
    first: dict[str, Work] = {}
    for work in variants():
        first.setdefault(work.op, work)
    return list(first.values())
