"""Numpy's types for PTX's, and the NaN that every operation of a GPU gives."""

from __future__ import annotations

from typing import Any

import numpy as np

# Registers hold bits, as unsigned numbers; predicates are bool.
BITS: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS: dict[int, Any] = {16: np.float16, 32: np.float32, 64: np.float64}
NAN = {16: 0x7FFF, 32: 0x7FFFFFFF, 64: 0x7FF8000000000000}


def type_of(kind: str, bits: int) -> Any:
    """Numpy's type for ``s32`` and such."""
    return {"s": SIGNED, "f": FLOATS}.get(kind, BITS)[bits]


def bits_of(x: Any) -> Any:
    """A number's bits."""
    return x.view(BITS[8 * x.dtype.itemsize])


def computed(x: Any) -> Any:
    """Bits of a float that was computed: every NaN is the same."""
    size = 8 * x.dtype.itemsize
    bad = x != x
    return np.where(bad, BITS[size](NAN[size]), bits_of(x)) if bad.any() else bits_of(x)
