"""Scalars for the CPU kernels: storage dtypes, the hash, lanes of a symbol.

Three habits make these kernels fast. numba promotes uint32 arithmetic to 64 bits, so every hash
step is cast back. numba lets a signed index be negative, so hot loops index with ``N`` (uint64).
The number of lanes is the length of a tuple of type ``Group``, so it is a constant by which LLVM
unrolls.

Functions that depend on a dtype are stubs, which ``overload`` fills in at compile time.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload, register_jitable

from tagc.ops.cpu.kernels.llvm import bits_float, float_bits, high_product, shift_right

U, N = np.uint32, np.uint64
# Nothing calls the kernels from C. numba's type stub lacks some options.
compiled = njit(  # pyright: ignore[reportCallIssue]
    nogil=True, cache=True, boundscheck=False, no_cfunc_wrapper=True
)


Group = tuple[int, ...]


def group_of(lanes: int) -> Group:
    """The tuple whose length tells the kernels how many elements a symbol carries."""
    return (0,) * lanes


def load(a, j):
    """Element ``j`` of ``a`` as float32.

    ``a`` is ``[n]`` float32, ``[n]`` uint16 with the bits of bfloat16, or None for -0.0, which
    changes no sum.
    """
    raise NotImplementedError


def store(a, j, x):
    """Write float32 ``x`` to element ``j`` of ``a``, rounded to nearest even in its dtype.

    ``a`` is ``[n]`` float32, ``[n]`` uint16 with the bits of bfloat16, or None, which stores
    nothing.
    """
    raise NotImplementedError


def store_finite(a, j, x):
    """:func:`store` for residuals: finite numbers stay finite, even in bfloat16."""
    raise NotImplementedError


@overload(load)
def _(a, j):
    if isinstance(a, types.NoneType):
        return lambda a, j: np.float32(-0.0)
    if a.dtype == types.uint16:
        return lambda a, j: bits_float(U(U(a[j]) << U(16)))
    return lambda a, j: a[j]


@overload(store)
def _(a, j, x):
    if isinstance(a, types.NoneType):
        return lambda a, j, x: None
    if a.dtype == types.uint16:
        return lambda a, j, x: _put_bfloat16(a, j, float_bits(x))

    def put(a, j, x):
        a[j] = x

    return put


@overload(store_finite)
def _(a, j, x):
    if isinstance(a, types.NoneType) or a.dtype != types.uint16:
        return lambda a, j, x: store(a, j, x)

    return lambda a, j, x: _put_bfloat16(a, j, _within_bfloat16(float_bits(x)))


@register_jitable
def _within_bfloat16(b):
    """uint32 bits of a float32, limited to the magnitude of bfloat16's largest number."""
    m = U(b & U(0x7FFFFFFF))
    return U(U(b & U(0x80000000)) | (m if m < U(0x7F7F0000) else U(0x7F7F0000)))


@register_jitable
def _put_bfloat16(a, j, b):
    """Round a float32 with the bits ``b`` (uint32) to nearest even in bfloat16, and write its bits
    to element ``j`` of ``a``, ``[n]`` uint16.

    A NaN stays a NaN if its lower 16 bits are zeros, as in NaNs from arithmetic.
    """
    odd = U(shift_right(b, U(16)) & U(1))
    a[j] = np.uint16(shift_right(U(U(b + U(0x7FFF)) + odd), U(16)))


@register_jitable(inline="always")
def fmix32(x):
    """MurmurHash3's 32-bit finalizer; uint32 to uint32."""
    x = U(x ^ (x >> U(16)))
    x = U(x * U(0x85EBCA6B))
    x = U(x ^ (x >> U(13)))
    x = U(x * U(0xC2B2AE35))
    return U(x ^ (x >> U(16)))


@register_jitable(inline="always")
def salts_of(seed, hashes):
    """One salt for each hash of a key: ``[hashes]`` uint32 from an int32 seed."""
    salts = np.empty(hashes, np.uint32)
    for i in range(hashes):
        salts[i] = fmix32(U(U(seed) * U(0x9E3779B9) + U(U(i + 1) * U(0x7F4A7C15))))
    return salts


@register_jitable(inline="always")
def positions(keys, count, salts, partition, where):
    """Cells of keys, in one loop per hash, so that it vectorizes.

    Args:
        keys: ``[count]`` uint32, or longer.
        count: number of keys.
        salts: ``[hashes]`` uint32, from :func:`salts_of`.
        partition: cells of a partition.
        where: ``[hashes, count]`` uint64, or wider, written: cell ``i`` of key ``t`` at ``[i, t]``.
    """
    for i in range(salts.size):
        positions_in(keys, count, salts, i, partition, where[i])


@register_jitable(inline="always")
def positions_in(keys, count, salts, i, partition, row):
    """The cell of every key in one partition.

    Args:
        i: index of the partition and of its hash.
        row: ``[count]`` uint32 or uint64, or longer, written: the cells.
        keys, count, salts, partition: as in :func:`positions`.
    """
    salt, first = salts[i], i * partition
    for t in range(N(count)):
        row[t] = first + high_product(fmix32(U(keys[t] ^ salt)), U(partition))


@register_jitable(inline="always")
def lane_of(v, lane, lanes):
    """Lane ``lane`` of ``lanes`` of an int32 sum of symbols, as int64.

    Adding half of each lane's range undoes all borrows at once: lanes become plain digits.
    """
    bits = N(32 // lanes)
    half = N(1) << (bits - N(1))
    bias = N(0)
    for i in range(N(lanes)):
        bias |= half << (bits * i)
    digit = ((N(U(v)) + bias) >> (bits * N(lane))) & ((half << N(1)) - N(1))
    return np.int64(digit) - np.int64(half)
