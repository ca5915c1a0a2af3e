"""The definition of the sketch codec: Python integers, float64, no shortcuts, no tagc.

Only the shape attributes of a layout (``groups``, ``words``, ``hashes``, ...) are read, so a
mistake in ``tagc.ops`` or ``tagc.ops.symbols`` cannot hide here, too. For small inputs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

# For tensors this small a second thread gains nothing. On shared cores OpenMP's threads spin while
# they wait for each other: a minute instead of a second.
torch.set_num_threads(1)

MASK = 0xFFFFFFFF
SENTINEL = 0x5A5A5A5A


def signed(v: int, bits: int) -> int:
    """The integer in ``[-2**(bits-1), 2**(bits-1))`` congruent to ``v``."""
    return (v + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def pack(lanes: list[int], bits: int) -> int:
    """``sum(q[i] * 2**(bits * i))`` modulo 2**32, signed."""
    return signed(sum(q << (bits * i) for i, q in enumerate(lanes)), 32)


def unpack(v: int, lanes: int, bits: int) -> list[int]:
    """The only lanes of ``bits`` bits that pack to ``v``."""
    out = []
    for _ in range(lanes):
        out.append(signed(v, bits))
        v = (v - out[-1]) >> bits
    return out


def mix(x: int) -> int:
    """MurmurHash3's finalizer."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & MASK
    x ^= x >> 13
    x = x * 0xC2B2AE35 & MASK
    return x ^ x >> 16


def cells_of(key: int, seed: int, layout: Any) -> list[int]:
    """Cells of a key: one in every partition, or the cell of its own number if ``direct``."""
    if layout.hashes == 1:
        return [key]
    cells = []
    for i in range(layout.hashes):
        salt = mix((seed * 0x9E3779B9 + (i + 1) * 0x7F4A7C15) & MASK)
        cells.append(i * layout.partition + (mix(key ^ salt) * layout.partition >> 32))
    return cells


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Finite float32 rounded to bfloat16, to nearest even, still stored as float32."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


def two_core(keys: list[int], seed: int, layout: Any) -> list[int]:
    """The keys that peeling leaves: each of their cells holds another one of them."""
    left = sorted(keys)
    while True:
        cells = {key: cells_of(key, seed, layout) for key in left}
        held = Counter(cell for some in cells.values() for cell in some)
        shared = [key for key in left if all(held[cell] > 1 for cell in cells[key])]
        if shared == left:
            return left
        left = shared


def support(kind: str, groups: int, keys: int, rng: np.random.Generator) -> np.ndarray:
    """``keys`` distinct groups, ascending: ``uniform``, or in ``rows`` as embeddings have them."""
    if kind == "uniform":
        return np.sort(rng.choice(groups, keys, replace=False))
    width = int(rng.integers(8, 65))
    rows = rng.permutation(-(-groups // width))
    members = (rows[: -(-keys // width) + 1, None] * width + np.arange(width)).reshape(-1)
    return np.sort(members[members < groups][:keys])


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """An output buffer that shows unwritten entries: NaN, or a sentinel."""
    value = float("nan") if dtype.is_floating_point else SENTINEL
    return torch.full(shape, value, dtype=dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit: NaN equals itself, zeros of different sign differ."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))


def dither_of(seed: int, n: int) -> np.ndarray:
    """The dither for ``n`` codes of a row with this seed, float64."""
    salt = mix(seed & MASK)
    halves = [mix(j >> 1 ^ salt) >> 16 * (j & 1) & 0xFFFF for j in range(n)]
    return (np.array(halves) + 0.5) / 2**16 - 0.5


def rounded_up(s: np.ndarray) -> np.ndarray:
    """The least bfloat16 that positive float32 exceed by at most 2 units in the last place."""
    s = s.copy()
    for _ in range(2):
        s = np.where(s > 0, np.nextafter(s, np.float32(0)), s)
    near = to_bfloat16(s)
    bits = near.view(np.uint32) + np.where(near < s, np.uint32(1 << 16), np.uint32(0))
    return bits.astype(np.uint32).view(np.float32)


def quantize_row(x: np.ndarray, bits: int, block: int, seed: int | None = None) -> np.ndarray:
    """What arrives ``[n]`` of ``quantize`` for float32 ``x`` ``[n]``; float64, NaN where
    the scale is NaN. With a seed, codes are dithered.

    In float64 products of float32 are exact; ``np.float32`` rounds them once.
    """
    n, levels = len(x), 2 ** (bits - 1) - 1
    blocks = -(-n // block)
    wide = np.zeros(blocks * block, np.float64)
    wide[:n] = x
    wide = wide.reshape(blocks, block)
    finite = np.isfinite(wide).all(1)
    wide[~finite] = 0.0
    largest = np.abs(wide).max(1, initial=0.0)
    s = (largest * float(np.float32(1 / levels))).astype(np.float32)
    largest_scale = np.float32(2.0**127 * (2 - 2.0**-7))
    if seed is None:
        s = to_bfloat16(np.minimum(s, largest_scale))
    else:
        s = np.minimum(rounded_up(s), largest_scale)
    s[s < 2.0**-126] = 0.0
    exact = s.astype(np.float64)[:, None]
    inverse = np.divide(1.0, exact, out=np.zeros_like(exact), where=exact > 0).astype(np.float32)
    scaled = (wide * inverse.astype(np.float64)).astype(np.float32).astype(np.float64)
    clipped = np.clip(scaled, -levels, levels)
    if seed is not None:
        v = dither_of(seed, wide.size).reshape(wide.shape)
        clipped = np.where(exact > 0, (clipped + v).astype(np.float32), 0.0)
    scale = np.where(finite, s, np.float32(np.nan)).astype(np.float64)
    return (np.rint(clipped) * scale[:, None]).reshape(-1)[:n]


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, except the bits of NaN."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and same_bits(a.masked_fill(nan, 0), b.masked_fill(nan, 0))
