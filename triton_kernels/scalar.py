"""Device functions that several kernels share: hash, bit tricks, storage dtypes, rounding.

Everything uses integer and correctly rounded operations, so a CPU and every GPU give the same bits.
"""

from __future__ import annotations

from .jit import jit, tl


@jit
def fmix32(x):
    """MurmurHash3's 32-bit finalizer; uint32."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@jit
def popcount(x):
    """Number of set bits of uint32 values, as int32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@jit
def load_words(pointer, mask):
    """Index words as uint32, 0 where masked off."""
    return tl.load(pointer, mask=mask, other=0).to(tl.uint32, bitcast=True)


@jit
def load_bitmap(row, w, groups):
    """Words ``w`` of a bitmap as uint32; bits past the last of ``groups`` groups are 0."""
    whole = groups // 32
    tail = ((tl.full([], 1, tl.int64) << (groups % 32)) - 1).to(tl.uint32)
    word = load_words(row + w, w < (groups + 31) // 32)
    return tl.where(w == whole, word & tail, word)


@jit
def bits_of(word):
    """``[N]`` uint32 to ``[N, 32]`` bool."""
    return ((word[:, None] >> tl.arange(0, 32).to(tl.uint32)[None, :]) & 1) != 0


@jit
def word_of(bits):
    """``[N, 32]`` bool to ``[N]`` int32."""
    # By bytes: a thread often has all bits of a byte, and then shifts are constants.
    bits = tl.reshape(bits.to(tl.uint32), [bits.shape[0], 4, 8])
    byte = tl.sum(bits << tl.arange(0, 8).to(tl.uint32), 2)
    word = tl.sum(byte << (tl.arange(0, 4).to(tl.uint32) * 8), 1)
    return word.to(tl.int32, bitcast=True)


@jit
def lowest_bit(word):
    """Place of the lowest set bit of uint32 values, int32; negative if no bit is set."""
    # A power of two is exact in float32, and its exponent is the place.
    bit = (word & (0 - word)).to(tl.float32)
    return (bit.to(tl.int32, bitcast=True) >> 23) - 127


@jit
def negated(x):
    """``-x`` of float32, also for zeros: Triton before 3.8 compiles a minus as ``0 - x``."""
    return (x.to(tl.int32, bitcast=True) ^ -0x80000000).to(tl.float32, bitcast=True)


@jit
def widen(x):
    """float32 of a float32, bfloat16 or float16 tensor, exactly."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@jit
def narrow_finite(x, dtype: tl.constexpr):
    """A finite float32 rounded to nearest even in a residual's dtype; it stays finite."""
    if dtype == tl.bfloat16:
        # The largest bfloat16.
        x = tl.minimum(tl.maximum(x, -3.3895313892515355e38), 3.3895313892515355e38)
    return x.to(dtype)


@jit
def magnitude(x):
    """Bits of ``|x|`` as int32, which sort like ``|x|``, with infinity and NaN on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def rint(x):
    """float32 rounded to the nearest integer, ties to even, the sign of zero kept.

    Below ``2**23``, adding ``2**23`` pushes the fraction out of the mantissa, rounding to nearest
    even. From ``2**23`` on, a float32 already is an integer.
    """
    b = x.to(tl.int32, bitcast=True)
    a = (b & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    a = tl.where(a < 8388608.0, (a + 8388608.0) - 8388608.0, a)
    b = a.to(tl.int32, bitcast=True) | (b & -0x80000000)
    return b.to(tl.float32, bitcast=True)


@jit
def lane_sums(v, LANES: tl.constexpr):
    """Signed lanes of summed symbols: ``[...]`` int32 to ``[..., LANES]`` int32.

    Adding half of a lane's span to every lane at once makes all lanes non-negative, which undoes
    the carries. int8x4: 511 + 0x80808080 = 0x8080827f; its bytes minus 128 are (-1, 2, 0, 0).
    """
    if LANES == 1:
        return tl.expand_dims(v, -1)
    else:
        BITS: tl.constexpr = 32 // LANES
        HALF: tl.constexpr = 1 << (BITS - 1)
        BIAS: tl.constexpr = 0x80808080 if LANES == 4 else 0x80008000
        u = v.to(tl.uint32, bitcast=True) + BIAS
        shift = tl.arange(0, LANES).to(tl.uint32) * BITS
        lanes = (tl.expand_dims(u, -1) >> shift) & ((1 << BITS) - 1)
        return lanes.to(tl.int32) - HALF
