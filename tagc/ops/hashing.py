"""The hash of sketches, dithers and their seeds, on tensors."""

from __future__ import annotations

from torch import Tensor

MASK = 0xFFFFFFFF


def fmix32(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer, a bijection, on an int64 tensor that holds uint32 values."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)
