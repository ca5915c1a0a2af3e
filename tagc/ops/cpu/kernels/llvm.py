"""Single LLVM instructions that numba has no name for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# numba passes its typing context first; callers do not, which type checkers cannot follow.
_instruction: Callable[..., Any] = intrinsic


@_instruction
def float_bits(typingctx, x):
    """Bits of a float32 as uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@_instruction
def bits_float(typingctx, x):
    """The float32 with these uint32 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@_instruction
def trailing_zeros(typingctx, x):
    """Index of the lowest set bit of a uint32, 32 if there is none."""

    def codegen(context, builder, signature, args):
        count = builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))
        return builder.zext(count, ir.IntType(64))

    return types.int64(types.uint32), codegen


@_instruction
def popcount(typingctx, x):
    """Number of set bits of a uint32."""

    def codegen(context, builder, signature, args):
        return builder.zext(builder.ctpop(args[0]), ir.IntType(64))

    return types.int64(types.uint32), codegen


@_instruction
def high_product(typingctx, x, y):
    """Upper 32 bits of the product of two uint32."""

    def codegen(context, builder, signature, args):
        wide = [builder.zext(a, ir.IntType(64)) for a in args]
        product = builder.mul(wide[0], wide[1])
        return builder.lshr(product, ir.Constant(ir.IntType(64), 32))

    return types.int64(types.uint32, types.uint32), codegen


@_instruction
def shift_left(typingctx, x, by):
    """A uint32 shifted by fewer than 32 bits; numba's own shift works on 64 bits."""

    def codegen(context, builder, signature, args):
        return builder.shl(args[0], args[1])

    return types.uint32(types.uint32, types.uint32), codegen


@_instruction
def shift_right(typingctx, x, by):
    """A uint32 shifted by fewer than 32 bits."""

    def codegen(context, builder, signature, args):
        return builder.lshr(args[0], args[1])

    return types.uint32(types.uint32, types.uint32), codegen


@_instruction
def shift_right_signed(typingctx, x, by):
    """The int32 with these uint32 bits, shifted by fewer than 32 bits, as float32."""

    def codegen(context, builder, signature, args):
        return builder.sitofp(builder.ashr(args[0], args[1]), ir.FloatType())

    return types.float32(types.uint32, types.uint32), codegen


@_instruction
def mask_at_least(typingctx, words, at, least):
    """Which of the 32 uint32 from ``words[at]`` on are at least so large, as bits."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        vector, undefined = ir.VectorType(ir.IntType(32), 32), ir.Undefined
        place = builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer())
        first = ir.Constant(ir.IntType(32), 0)
        one = builder.insert_element(ir.Constant(vector, undefined), args[2], first)
        splat = builder.shuffle_vector(one, ir.Constant(vector, undefined), vector([0] * 32))
        found = builder.icmp_unsigned(">=", builder.load(place, align=4), splat)
        return builder.bitcast(found, ir.IntType(32))

    return types.uint32(words, types.uint64, types.uint32), codegen
