"""Arithmetic of floats as IEEE 754 has it: nothing is approximate, flushed or contracted.

``integers`` registers the opcodes, which both share.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .numbers import BITS, FLOATS, computed
from .parse import Instruction
from .registry import Step, calculation, emulates, need

_SUMS: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
}  # fmt: skip


def arithmetic(i: Instruction) -> Step:
    """``add``, ``sub``, ``mul``, ``div``, ``min``, ``max``, ``abs`` and ``neg``."""
    need("ftz" not in i.parts and "approx" not in i.parts and "full" not in i.parts, "not IEEE")
    bits, number = i.bits, FLOATS.get(i.bits)
    if i.parts[-1] == "f16x2":
        need(i.base == "abs", "pairs")
        return calculation(i, lambda x: x & np.uint32(0x7FFF7FFF), 32)
    sign = BITS[bits](1 << (bits - 1))
    if i.base == "abs":
        return calculation(i, lambda x: x & ~sign, bits)
    if i.base == "neg":
        return calculation(i, lambda x: x ^ sign, bits)
    if i.base in ("min", "max"):
        need(len(i.parts) == 2, "modifiers")
        return calculation(
            i, lambda x, y: _least(x.view(number), y.view(number), i.base == "max"), bits, bits
        )
    need(i.parts[1] == "rn" and i.base in _SUMS, "how it rounds")
    function = _SUMS[i.base]
    return calculation(i, lambda x, y: computed(function(x.view(number), y.view(number))),
                       bits, bits)  # fmt: skip


def _least(x, y, largest: bool):
    """Of a NaN and a number the number; minus zero is less than zero."""
    got = (np.fmax if largest else np.fmin)(x, y)
    zeros = (x == 0) & (y == 0)
    if zeros.any():
        signs = np.logical_and if largest else np.logical_or
        negative = signs(np.signbit(x), np.signbit(y))
        zero = np.where(negative, -np.zeros_like(got), np.zeros_like(got))
        got = np.where(zeros, zero, got)
    return computed(got)


@emulates("fma")
def fused(i: Instruction) -> Step:
    """A product and a sum, rounded once."""
    need(i.parts[1:] == ("rn", "f32"), "modifiers")

    def function(x, y, z):
        x, y, z = (operand.view(np.float32).astype(np.float64) for operand in (x, y, z))
        product = x * y  # of 48 bits at most
        total = product + z
        # What that left out, exactly; rounded to odd, the second rounding is as good as one.
        back = total - product
        left = (product - (total - back)) + (z - back)
        even = total.view(np.uint64) % 2 == 0
        odd = np.where(even & (left != 0), np.nextafter(total, np.copysign(np.inf, left)), total)
        return computed(np.where(np.isfinite(total), odd, total).astype(np.float32))

    return calculation(i, function, 32, 32, 32)


def comparison(name: str) -> Any:
    """Function of two floats; false where one is NaN."""
    ordered = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    need(name in ordered, "how it compares")
    return ordered[name]
