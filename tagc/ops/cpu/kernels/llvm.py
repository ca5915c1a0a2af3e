"""Single LLVM instructions that numba has no name for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# numba passes its typing context first and callers do not, which type checkers cannot follow.
_instruction: Callable[..., Any] = intrinsic

_INT, _FLOAT = ir.IntType(32), ir.FloatType()


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
    """Index of the lowest set bit of a uint32, 32 if there is none; of a uint64, 64."""

    def codegen(context, builder, signature, args):
        count = builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))
        return count if count.type.width == 64 else builder.zext(count, ir.IntType(64))

    return types.int64(x), codegen


@_instruction
def popcount(typingctx, x):
    """Number of set bits of a uint32 or uint64."""

    def codegen(context, builder, signature, args):
        count = builder.ctpop(args[0])
        return count if count.type.width == 64 else builder.zext(count, ir.IntType(64))

    return types.int64(x), codegen


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
    """Bits that mark which of the 32 uint32 from ``words[at]`` on are at least ``least``."""

    def codegen(context, builder, signature, args):
        lanes = _load(builder, _address(context, builder, signature, args, 0), _INT, 32)
        found = builder.icmp_unsigned(">=", lanes, _splat(builder, args[2], 32))
        return builder.bitcast(found, ir.IntType(32))

    return types.uint32(words, types.uint64, types.uint32), codegen


@_instruction
def put_places(typingctx, keys, t, first, places):
    """Write ``first`` plus each of 8 bytes, the lowest first, to 8 uint32 from ``keys[t]`` on."""

    def codegen(context, builder, signature, args):
        lanes = builder.bitcast(args[3], ir.VectorType(ir.IntType(8), 8))
        lanes = builder.zext(lanes, ir.VectorType(_INT, 8))
        _store(
            builder,
            builder.add(lanes, _splat(builder, args[2], 8)),
            _address(context, builder, signature, args, 0),
        )
        return context.get_dummy_value()

    return types.void(keys, types.uint64, types.uint32, types.uint64), codegen


def _codes(add: bool) -> Any:
    """An instruction that unpacks 8 words of codes, and adds or writes the elements (``add``)."""

    def take_apart(typingctx, words, at, group, s, out, to, apart):
        width = 32 // len(group)

        def codegen(context, builder, signature, args):
            source = _address(context, builder, signature, args, 0)
            place = _address(context, builder, signature, args, 4)
            word, scale = _load(builder, source, _INT, 8), _splat(builder, args[3], 8)
            above = ir.Constant(word.type, [32 - width] * 8)
            for i in range(len(group)):
                up = ir.Constant(word.type, [32 - width * (i + 1)] * 8)
                code = builder.ashr(builder.shl(word, up), above)
                x = builder.fmul(scale, builder.sitofp(code, scale.type))
                if add:
                    x = builder.fadd(_load(builder, place, _FLOAT, 8), x)
                _store(builder, x, place)
                place = builder.gep(place, [args[6]])
            return context.get_dummy_value()

        index = types.uint64
        return types.void(words, index, group, types.float32, out, index, index), codegen

    take_apart.__doc__ = f"""{"Add" if add else "Write"} the elements of 8 words of a block's codes.

    Args:
        words: ``[...]`` uint32, of which 8 from ``at`` on are taken.
        group: a tuple of as many entries as a word has codes.
        s: float32, the scale.
        out: ``[...]`` float32; the codes ``i`` of the words belong to 8 elements from
            ``to + i * apart`` on.
    """
    return _instruction(take_apart)


put_codes, add_codes = _codes(add=False), _codes(add=True)


@_instruction
def add_pairs(typingctx, source, at, target, to):
    """Add 16 neighbours in pairs: write ``source[at + 2 * k] + source[at + 2 * k + 1]`` to
    ``target[to + k]``, float32, for ``k`` below 8."""

    def codegen(context, builder, signature, args):
        x = _load(builder, _address(context, builder, signature, args, 0), _FLOAT, 16)
        places, other = ir.VectorType(_INT, 8), ir.Constant(x.type, ir.Undefined)
        even, odd = (
            builder.shuffle_vector(x, other, ir.Constant(places, list(range(first, 16, 2))))
            for first in (0, 1)
        )
        total = builder.fadd(even, odd)
        _store(builder, total, _address(context, builder, signature, args, 2))
        return context.get_dummy_value()

    return types.void(source, types.uint64, target, types.uint64), codegen


@_instruction
def drain(typingctx, sums, at, factor, out, to):
    """Write 32 bytes of the output past the caches, and set the sums to zero.

    Args:
        sums: ``[...]`` float32, read from ``at`` on, and set to zero.
        factor: float32, multiplies the sums.
        out: ``[...]`` float32 or the bits of bfloat16 as uint16, written from ``to`` on, rounded to
            nearest even. ``out[to]`` lies at a multiple of 32 bytes. A NaN stays a NaN if its lower
            16 bits are zeros, as in NaNs from arithmetic.
    """
    lanes = 32 // (out.dtype.bitwidth // 8)

    def codegen(context, builder, signature, args):
        source = _address(context, builder, signature, args, 0)
        target = _address(context, builder, signature, args, 3)
        x = _load(builder, source, _FLOAT, lanes)
        _store(builder, ir.Constant(x.type, None), source)
        x = builder.fmul(x, _splat(builder, args[2], lanes))
        if lanes == 16:
            x = _bfloat16(builder, x, lanes)
        store = builder.store(x, builder.bitcast(target, x.type.as_pointer()), align=32)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT, 1)]))
        return context.get_dummy_value()

    return types.void(sums, types.uint64, types.float32, out, types.uint64), codegen


@_instruction
def fence(typingctx):
    """Make stores past the caches visible to other threads before any later store."""

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _address(context: Any, builder: Any, signature: Any, args: Any, i: int) -> Any:
    """Address of element ``args[i + 1]`` of the array ``args[i]``."""
    data = context.make_array(signature.args[i])(context, builder, args[i]).data
    return builder.gep(data, [args[i + 1]])


def _load(builder: Any, address: Any, dtype: Any, lanes: int) -> Any:
    """Load ``lanes`` neighbours from any address."""
    pointer = builder.bitcast(address, ir.VectorType(dtype, lanes).as_pointer())
    return builder.load(pointer, align=4)


def _store(builder: Any, lanes: Any, address: Any) -> None:
    """Write a vector to any address."""
    builder.store(lanes, builder.bitcast(address, lanes.type.as_pointer()), align=4)


def _splat(builder: Any, x: Any, lanes: int) -> Any:
    """A vector that repeats one number."""
    vector = ir.VectorType(x.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), x, ir.Constant(_INT, 0))
    zeros = ir.Constant(ir.VectorType(_INT, lanes), None)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _bfloat16(builder: Any, x: Any, lanes: int) -> Any:
    """The bits of float32 numbers as bfloat16, as ``_put_bfloat16`` in :mod:`.scalar`."""

    def constant(n: int) -> Any:
        return ir.Constant(ir.VectorType(_INT, lanes), [n] * lanes)

    bits = builder.bitcast(x, ir.VectorType(_INT, lanes))
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    up = builder.add(builder.add(bits, constant(0x7FFF)), odd)
    return builder.trunc(builder.lshr(up, constant(16)), ir.VectorType(ir.IntType(16), lanes))
