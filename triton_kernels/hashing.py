"""Hashing: the cells of a key, and the key of a cell that holds only one.

Key ``k`` owns cell ``fmix32(k ^ salt_i) * partition >> 32`` of partition ``i``. ``fmix32`` is a
bijection, so the keys of a cell have different hashes, which lie in one interval of at most
``ceil(2^32 / partition)`` numbers. The low bits of a hash distinguish the numbers of that interval,
so cell and low bits give the hash, and the hash gives the key.

Worked example (partition 2^20): the hashes of cell 3 are 0x3000 to 0x3fff, so the low 16 bits
0x3abc mean the hash 0x3abc.
"""

from __future__ import annotations

from .jit import jit, tl
from .scalar import fmix32


@jit
def salt_of(seed, i):
    """Salt of partition ``i``, uint32. Both arguments are int32 scalars; ``i`` may be a number."""
    turn = tl.full([], 1, tl.uint32) + i
    return fmix32(seed.to(tl.uint32, bitcast=True) * 0x9E3779B9 + turn.to(tl.uint32) * 0x7F4A7C15)


@jit
def hash_of(key, seed, i):
    """Hashes of keys for partition ``i``; uint32."""
    return fmix32(key ^ salt_of(seed, i))


@jit
def cell_at(h, partition, i):
    """Cells in the whole table, int32, of the hashes ``h`` (uint32) for partition ``i``."""
    spread = tl.umulhi(h, tl.full(h.shape, 0, tl.uint32) + partition)
    return spread.to(tl.int32) + i * partition


@jit
def unmix32(h):
    """The inverse of ``fmix32``; uint32."""
    h = h ^ (h >> 16)
    h = h * 0x7ED1B41D
    h = h ^ (h >> 13) ^ (h >> 26)
    h = h * 0xA5CB9243
    return h ^ (h >> 16)


@jit
def key_of(cell, low, seed, partition, inverse, HASHES: tl.constexpr):
    """The key of each cell whose hash has these low 16 bits; uint32.

    Args:
        cell: int32, in the whole table.
        low: uint32; higher bits are ignored.
        inverse: ``2^63 // partition``, for a partition with at most ``0xFFFE`` hashes per cell.
    """
    salt = tl.full(cell.shape, 0, tl.uint32) + salt_of(seed, 0)
    place = cell
    for i in tl.static_range(1, HASHES):
        there = cell >= i * partition
        salt = tl.where(there, salt_of(seed, i), salt)
        place = tl.where(there, cell - i * partition, place)
    # At most 2 below the first hash of the cell: the quotient and the product are rounded down.
    first = ((place.to(tl.int64) * inverse) >> 31).to(tl.uint32)
    return unmix32(first + ((low - first) & 0xFFFF)) ^ salt
