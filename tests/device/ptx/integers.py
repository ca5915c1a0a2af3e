"""Integers, bits and predicates."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import floats
from .numbers import BITS, FLOATS, bits_of, type_of
from .parse import Instruction
from .registry import Step, calculation, emulates, need
from .threads import Threads, operand

_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@emulates("add", "sub", "min", "max", "abs", "neg")
def arithmetic(i: Instruction) -> Step:
    """Sums and the like, of floats as well."""
    if i.kind == "f":
        return floats.arithmetic(i)
    need(len(i.parts) == 2 and i.base != "abs", "modifiers")
    signed = type_of(i.kind, i.bits)
    if i.base == "neg":
        return calculation(i, lambda x: bits_of(np.negative(x.view(signed))), i.bits)
    if i.base in ("min", "max"):
        least = {"min": np.minimum, "max": np.maximum}[i.base]
        return calculation(
            i, lambda x, y: bits_of(least(x.view(signed), y.view(signed))), i.bits, i.bits
        )
    sums = {"add": np.add, "sub": np.subtract}[i.base]
    return calculation(i, lambda x, y: sums(x, y), i.bits, i.bits)


@emulates("mul", "mad", "div", "rem")
def products(i: Instruction) -> Step:
    """Products, of 32 bits in 64 as well, and quotients, rounded towards zero."""
    if i.kind == "f":
        return floats.arithmetic(i)
    number, bits = type_of(i.kind, i.bits), i.bits
    if i.base in ("div", "rem"):
        return _quotient(i)
    big, out = type_of(i.kind, min(2 * bits, 64)), bits
    if "wide" in i.parts:
        out = 2 * bits

    def product(x, y):
        if "lo" in i.parts:
            return x * y
        if bits == 64:
            return bits_of(_high_half(x.view(np.uint64), y.view(np.uint64)))
        whole = x.view(number).astype(big) * y.view(number).astype(big)
        return bits_of(whole if "wide" in i.parts else (whole >> big(bits)).astype(number))

    need(bits <= 32 or "lo" in i.parts or number is np.uint64, "the high half, with signs")
    need(len({"lo", "hi", "wide"} & {*i.parts}) == 1, "which half")
    if i.base == "mul":
        return calculation(i, product, bits, bits)
    return calculation(i, lambda x, y, z: product(x, y) + z, bits, bits, out)


def _high_half(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b, c, d = x >> half, x & low, y >> half, y & low
    middle = (b * d >> half) + (a * d & low) + b * c
    return a * c + (a * d >> half) + (middle >> half)


def _quotient(i: Instruction) -> Step:
    number = type_of(i.kind, i.bits)
    target = i.operands[0]
    inputs = [operand(text, i.bits) for text in i.operands[1:]]

    def run(t: Threads, mask: np.ndarray | None) -> None:
        x, y = (t.full(read(t)).view(number) for read in inputs)
        # Threads that do not take part may divide by anything.
        y = y if mask is None else np.where(mask, y, number(1))
        assert (y != 0).all(), f"{i.where}: division by zero"
        rest = np.fmod(x, y)
        t.write(target, bits_of(rest if i.base == "rem" else (x - rest) // y), mask)

    return run


@emulates("and", "or", "xor", "not")
def logic(i: Instruction) -> Step:
    """Bit by bit, or predicates."""
    bits = 1 if i.kind == "pred" else i.bits
    if i.base == "not":
        return calculation(i, np.invert, bits)
    return calculation(i, _LOGIC[i.base], bits, bits)


@emulates("shl", "shr")
def shift(i: Instruction) -> Step:
    """Shifts; by the width and more they give zero or, right and signed, the sign."""
    number, bits = type_of(i.kind, i.bits), i.bits

    def shifted(x, by):
        x = x.view(number)
        if i.base == "shr" and i.kind == "s":
            return bits_of(x >> np.minimum(by, np.uint32(bits - 1)).astype(number))
        few = by < bits
        by = np.where(few, by, np.uint32(0)).astype(number)
        return np.where(few, bits_of(x << by if i.base == "shl" else x >> by), BITS[bits](0))

    return calculation(i, shifted, bits, 32)


@emulates("shf")
def funnel(i: Instruction) -> Step:
    """The high word of two words shifted left, or the low one of two shifted right."""
    need(i.parts[2] == "wrap", "clamped")

    def shifted(low, high, by):
        both = (np.uint64(high) << np.uint64(32)) | np.uint64(low)
        by = (by & np.uint32(31)).astype(np.uint64)
        both = (both << by) >> np.uint64(32) if i.parts[1] == "l" else both >> by
        return both.astype(np.uint32)

    def wide(low, high, by):
        return shifted(low.astype(np.uint64), high.astype(np.uint64), by)

    return calculation(i, wide, 32, 32, 32)


@emulates("bfe")
def field(i: Instruction) -> Step:
    """A field of bits, its place and length in the low bytes of two words."""

    signed = i.kind == "s"
    number: Any = np.int64 if signed else np.uint64

    def extract(x, place, length):
        place, length = (v.astype(np.int64) & 255 for v in (place, length))
        # Beyond the word there are copies of its sign, or zeros.
        place = np.minimum(place, i.bits - 1 if signed else i.bits)
        kept = np.minimum(length, i.bits - place)
        high = x.astype(np.uint64) << (64 - place - kept).astype(np.uint64)
        got = high.view(number) >> (64 - kept).astype(number)
        return np.where(kept > 0, got, number(0)).astype(BITS[i.bits])

    return calculation(i, extract, i.bits, 32, 32)


@emulates("popc")
def count(i: Instruction) -> Step:
    """Set bits."""
    places = np.arange(i.bits).astype(BITS[i.bits])

    def ones(x: np.ndarray) -> np.ndarray:
        return ((x[..., None] >> places) & BITS[i.bits](1)).sum(-1).astype(np.uint32)

    return calculation(i, lambda x: ones(np.asarray(x)), i.bits)


@emulates("prmt")
def permute(i: Instruction) -> Step:
    """Bytes of two words, chosen by the nibbles of a third."""
    need(i.parts == ("prmt", "b32"), "modes")

    def choose(low, high, chosen):
        both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        out = np.uint64(0)
        for k in range(4):
            nibble = (chosen.astype(np.uint64) >> np.uint64(4 * k)) & np.uint64(15)
            byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
            byte = np.where(nibble >= 8, sign, byte)
            out = out | (byte << np.uint64(8 * k))
        return out.astype(np.uint32)

    return calculation(i, choose, 32, 32, 32)


@emulates("selp")
def select(i: Instruction) -> Step:
    """One of two, by a predicate."""
    return calculation(i, lambda x, y, p: np.where(p, x, y), i.bits, i.bits, 1)


_COMPARE: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip


@emulates("setp")
def compare(i: Instruction) -> Step:
    """A predicate of two numbers; of floats unordered comparisons, too."""
    number, name = type_of(i.kind, i.bits), i.parts[1]
    holds = floats.comparison(name) if number in FLOATS.values() else _COMPARE[name]

    def test(x, y):
        return holds(x.view(number), y.view(number))

    if len(i.operands) == 4:
        join = _LOGIC[i.parts[2]]
        return calculation(i, lambda x, y, p: join(test(x, y), p), i.bits, i.bits, 1)
    return calculation(i, test, i.bits, i.bits)
