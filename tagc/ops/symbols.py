"""Symbols: a group of quantized elements in one 32-bit word that can be summed.

A symbol carries ``lanes`` signed integers of ``bits`` bits each::

    v = sum(q[i] * 2**(bits * i) for i in range(lanes))   (mod 2**32)

with carries and borrows left in place. Adding symbols modulo 2**32 then adds all lanes at once. The
sum decodes exactly if every *final* lane sum fits its ``bits`` bits; overflow on the way is
harmless in arithmetic modulo 2**32.

Worked example (``int8x4``): q = (-1, 2, 0, 0) is v = -1 + 2*256 = 511; adding (1, -2, 0, 3) =
1 - 512 + 3*2**24 gives 50331648 = 3*2**24, which decodes to (0, 0, 0, 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """A symbol format.

    Attributes:
        name: the name in policies.
        lanes: number of elements of one symbol (the group size).
        bits: bits per element.
        headroom: log2 of the largest magnitude that can be sent, in thresholds. Larger elements
            saturate, and the excess stays in the residual.
    """

    name: str
    lanes: int
    bits: int
    headroom: int

    @cached_property
    def qmax(self) -> int:
        """Largest lane sum that decodes exactly."""
        return (1 << (self.bits - 1)) - 1

    def levels(self, world_size: int) -> int:
        """Largest magnitude that each of ``world_size`` ranks may send so that sums always fit.

        The result is a float32-representable integer, so that clipping in float32 is exact.

        Raises:
            ValueError: if the lanes are too narrow for this many ranks.
        """
        levels = self.qmax // world_size
        if levels < 1:
            raise ValueError(
                f"symbol {self.name} cannot hold a sum over {world_size} ranks "
                f"({self.bits} bits per element); use a wider symbol or 'auto'"
            )
        spare = max(0, levels.bit_length() - 24)
        return (levels >> spare) << spare

    def step_shift(self, levels: int) -> int:
        """``a`` in ``step = 2**(floor(log2(threshold)) - a)`` for this many levels.

        Ties the quantization step to the threshold: elements of magnitude up to about
        ``2**headroom`` thresholds are representable.
        """
        return (levels + 1).bit_length() - 1 - self.headroom


SYMBOLS: dict[str, Symbol] = {
    s.name: s
    for s in (
        Symbol(name="int8x4", lanes=4, bits=8, headroom=4),
        Symbol(name="int16x2", lanes=2, bits=16, headroom=7),
        Symbol(name="int32x1", lanes=1, bits=32, headroom=12),
    )
}

# With fewer levels per rank, an int8 lane quantizes too coarsely near the threshold.
_MIN_LEVELS_AUTO = 7


def resolve_symbol(name: str, world_size: int) -> Symbol:
    """The symbol called ``name``; ``auto`` is the narrowest one with 7 levels per rank or more.

    Raises:
        ValueError: if none has so many.
    """
    if name != "auto":
        return SYMBOLS[name]
    for symbol in SYMBOLS.values():
        if symbol.qmax // world_size >= _MIN_LEVELS_AUTO:
            return symbol
    raise ValueError(f"no symbol can hold a sum over {world_size} ranks")


def wrap_int32(x: Tensor) -> Tensor:
    """int64 tensor reduced modulo 2**32 to int32 (two's complement)."""
    x = x & 0xFFFFFFFF
    return (x - ((x >> 31) << 32)).to(torch.int32)


def pack(q: Tensor, symbol: Symbol) -> Tensor:
    """Integer lanes to symbols.

    Args:
        q: ``[..., lanes]`` integer tensor, each lane within ``bits`` bits (two's complement).
        symbol: their format.

    Returns:
        ``[...]`` int32 symbols.
    """
    shifts = torch.arange(symbol.lanes, device=q.device, dtype=torch.int64) * symbol.bits
    return wrap_int32((q.to(torch.int64) << shifts).sum(-1))


def unpack(v: Tensor, symbol: Symbol) -> Tensor:
    """Symbols (or sums of symbols) to integer lanes.

    Args:
        v: ``[...]`` int32 symbols.
        symbol: their format.

    Returns:
        ``[..., lanes]`` int32 lane sums.
    """
    # Adding half of each lane's range undoes all borrows at once: lanes become plain digits.
    half = 1 << (symbol.bits - 1)
    shifts = torch.arange(symbol.lanes, device=v.device, dtype=torch.int64) * symbol.bits
    biased = v.to(torch.int64) + (half << shifts).sum()
    return (((biased[..., None] >> shifts) & (2 * half - 1)) - half).to(torch.int32)
