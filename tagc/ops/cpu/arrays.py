"""What all CPU kernels share: tensors as arrays, elements as float32, compilation once a host.

Three habits make the kernels fast. numba promotes uint32 arithmetic to 64 bits, so every step of a
hash or a shift is cast back. numba lets a signed index be negative, so hot loops index with ``N``
(uint64). The number of codes in a word, or of elements in a group, is the length of a tuple
``group``, so it is a constant by which LLVM unrolls.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload, register_jitable
from torch import Tensor

from tagc.basics.files import locked

U, N, F = np.uint32, np.uint64, np.float32
ABS, INF = U(0x7FFFFFFF), U(0x7F800000)
"""Mask of a float32's magnitude, and the bits of infinity. Magnitudes sort like their bits."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel, which is compiled when it is first called with arguments of new types. One process
    of a host compiles; the ranks that wait then find the kernel in numba's cache."""
    # Nothing calls the kernels from C. numba's type stub lacks some options.
    kernel: Any = njit(  # pyright: ignore[reportCallIssue]
        nogil=True, cache=True, boundscheck=False, no_cfunc_wrapper=True, error_model="numpy"
    )(function)
    compile_for = kernel.compile

    def once_a_host(types: Any) -> Any:
        # Beside the compiled kernels: if no file can be written here, numba cannot write its cache.
        with locked(Path(__file__).parent / "__pycache__", f"{function.__qualname__} {types}"):
            return compile_for(types)

    kernel.compile = once_a_host
    return kernel


def group_of(lanes: int) -> tuple[int, ...]:
    """The tuple whose length tells the kernels how many codes a word holds."""
    return (0,) * lanes


def bits16(t: Tensor) -> np.ndarray:
    """The bits of 16-bit floats, uint16, in the same memory."""
    return t.view(torch.uint16).numpy()


def numpy_of(t: Tensor | None) -> Any:
    """The memory of a tensor as an array; bfloat16 as its bits, in uint16; None for None."""
    if t is None:
        return None
    return bits16(t) if t.dtype == torch.bfloat16 else t.numpy()


def widened(t: Tensor) -> Tensor:
    """float16 as float32, because numba has no float16 arithmetic on CPUs; others as they are."""
    return t.float() if t.dtype == torch.float16 else t


def words_of(t: Tensor) -> Any:
    """``[...]`` int32 words as uint32, in the same memory."""
    return t.view(torch.uint32).numpy()


def rows_of(t: Tensor) -> tuple[Any, int]:
    """Rows of words, which may lie apart, as one array and the distance between rows. (numba does
    not know that a row of a two-dimensional array is contiguous; a slice of this is.)

    Args:
        t: ``[R, words]`` int32, with unit stride in its last dimension.
    """
    if not t.numel():
        return words_of(t.flatten()), 0
    stride = t.stride(0)
    return words_of(t.as_strided(((len(t) - 1) * stride + t.shape[1],), (1,))), stride


@register_jitable
def bits_of(x):
    """Bits of a float32 as uint32."""
    return np.float32(x).view(np.uint32)


@register_jitable
def float_of(bits):
    """The float32 with these uint32 bits."""
    return np.uint32(bits).view(np.float32)


def load(a, j):
    """Element ``j`` of ``a`` as float32; ``a`` is float32, uint16 with the bits of bfloat16, or
    None for -0.0, which changes no sum."""
    raise NotImplementedError


def store(a, j, x):
    """Write float32 ``x`` to element ``j`` of ``a``, as in :func:`load`, rounded to nearest even.
    None stores nothing."""
    raise NotImplementedError


def store_finite(a, j, x):
    """:func:`store` for residuals: finite numbers stay finite, even in bfloat16."""
    raise NotImplementedError


@overload(load)
def _(a, j):
    if isinstance(a, types.NoneType):
        return lambda a, j: F(-0.0)
    if a.dtype == types.uint16:
        return lambda a, j: float_of(U(a[j]) << U(16))
    return lambda a, j: a[j]


@overload(store)
def _(a, j, x):
    if isinstance(a, types.NoneType):
        return lambda a, j, x: None
    if a.dtype == types.uint16:
        return lambda a, j, x: _put_bfloat16(a, j, bits_of(x))

    def put(a, j, x):
        a[j] = x

    return put


@overload(store_finite)
def _(a, j, x):
    if isinstance(a, types.NoneType) or a.dtype != types.uint16:
        return lambda a, j, x: store(a, j, x)

    def put(a, j, x):
        bits = bits_of(x)
        magnitude = min(U(bits & ABS), U(0x7F7F0000))  # bfloat16's largest number
        _put_bfloat16(a, j, U(U(bits & ~ABS) | magnitude))

    return put


@register_jitable
def _put_bfloat16(a, j, bits):
    """Round a float32 with these bits to bfloat16. A NaN stays one if its lower 16 bits are zeros,
    as in NaNs from arithmetic."""
    odd = U(U(bits >> U(16)) & U(1))
    a[j] = np.uint16(U(U(bits + U(0x7FFF)) + odd) >> U(16))


@register_jitable(inline="always")
def shift_left(x, by):
    """uint32 ``x`` shifted by fewer than 32 bits. (The mask tells LLVM so, which then shifts 32
    bits instead of 64.)"""
    return U(x << U(by & U(31)))


@register_jitable(inline="always")
def shift_right(x, by):
    """See :func:`shift_left`."""
    return U(x >> U(by & U(31)))


@register_jitable(inline="always")
def signed_code(x, by):
    """See :func:`shift_right`: with copies of the sign bit, as float32."""
    return F(np.int32(np.int32(x) >> np.int32(by & U(31))))


@register_jitable(inline="always")
def fmix32(x):
    """MurmurHash3's 32-bit finalizer; uint32 to uint32."""
    x = U(x ^ (x >> U(16)))
    x = U(x * U(0x85EBCA6B))
    x = U(x ^ (x >> U(13)))
    x = U(x * U(0xC2B2AE35))
    return U(x ^ (x >> U(16)))


@register_jitable
def write_average(sums, count, divisor, add, out, base):
    """Divide the first ``count`` of ``sums``, float32, and write them to ``out`` from ``base`` on,
    or add them (``add``)."""
    if add:
        for j in range(count):
            store(out, base + j, load(out, base + j) + sums[j] / divisor)
    else:
        for j in range(count):
            store(out, base + j, sums[j] / divisor)
