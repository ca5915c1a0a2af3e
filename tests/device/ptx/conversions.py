"""Moves and conversions."""

from __future__ import annotations

import numpy as np

from .numbers import BITS, FLOATS, NAN, bits_of, computed, type_of
from .parse import Instruction, elements
from .registry import Step, calculation, emulates, need
from .threads import Threads, operand


@emulates("mov")
def move(i: Instruction) -> Step:
    """A copy; several registers make a wider one, or the other way round."""
    bits = 1 if i.kind == "pred" else i.bits
    targets, sources = elements(i.operands[0]), elements(i.operands[1])
    if len(targets) == len(sources) == 1:
        return calculation(i, lambda x: x, bits)
    if len(targets) == 1:
        part = bits // len(sources)
        inputs = [operand(s, part) for s in sources]

        def pack(t: Threads, mask: np.ndarray | None) -> None:
            parts = (x(t).astype(BITS[bits]) << BITS[bits](k * part) for k, x in enumerate(inputs))
            t.write(targets[0], np.bitwise_or.reduce([t.full(p) for p in parts]), mask)

        return pack
    part = bits // len(targets)
    whole = operand(sources[0], bits)

    def unpack(t: Threads, mask: np.ndarray | None) -> None:
        value = whole(t)
        for k, target in enumerate(targets):
            t.write(target, (value >> BITS[bits](k * part)).astype(BITS[part]), mask)

    return unpack


@emulates("cvt")
def convert(i: Instruction) -> Step:
    """Between integers and floats of all widths, with the rounding that the opcode names."""
    to, source = i.parts[-2], i.parts[-1]
    if to in ("f16x2", "bf16x2"):
        return _convert_pair(i)
    if to == "bf16":
        need(i.parts[1:] == ("rn", "bf16", "f32"), "how it rounds")
        return calculation(i, _bfloat16, 32)
    rounding = i.parts[1] if len(i.parts) == 4 else ""
    need(len(i.parts) <= 4 and all(x[1:] in ("8", "16", "32", "64") for x in (to, source)), "what")
    wide, narrow = int(source[1:]), int(to[1:])
    before, after = type_of(source[0], wide), type_of(to[0], narrow)

    def converted(x):
        x = x.astype(BITS[wide]).view(before)
        if source[0] == "f" and to[0] == "f":
            got = computed(x.astype(after))
            return np.where(x != x, BITS[narrow](NAN[narrow]), got)
        if source[0] == "f":
            limits = np.iinfo(after)
            # float64 holds every float32 and, up to its rounding, the limits of integers.
            whole = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0))
            low, high = whole <= limits.min, whole >= limits.max
            whole = np.where(low | high, 0, whole)
            got = np.where(low, limits.min, np.where(high, limits.max, whole.astype(after)))
            return bits_of(got.astype(after))
        if to[0] == "f":
            assert rounding == "rn", i
            return bits_of(x.astype(after))
        got = x.astype(after)
        # No register is narrower than 16 bits.
        return bits_of(got.astype(type_of(to[0], 16))) if narrow == 8 else bits_of(got)

    floats_only = to[0] == "f" or source[0] != "f"
    need(rounding in ("", "rn") if floats_only else rounding == "rzi", "how it rounds")
    need(wide in FLOATS or source[0] != "f", "a float")
    return calculation(i, converted, 16 if wide == 8 else wide)


def _convert_pair(i: Instruction) -> Step:
    """Two floats to halves of a register, the first to the upper one."""
    need(i.parts[1:] in (("rn", "f16x2", "f32"), ("rn", "bf16x2", "f32")), "how it rounds")

    def half(x):
        if i.parts[2] == "bf16x2":
            return _bfloat16(x).astype(np.uint32)
        return computed(x.view(np.float32).astype(np.float16)).astype(np.uint32)

    return calculation(i, lambda high, low: half(high) << np.uint32(16) | half(low), 32, 32)


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """Bits of float32, as those of bfloat16: the upper half, to nearest even."""
    near = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    bad = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(bad, np.uint16(NAN[16]), near.astype(np.uint16))
