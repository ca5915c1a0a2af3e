"""A stand-in for ``triton.language`` that computes with :mod:`.values` and notes accesses."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from .values import Bits, Pointer, Value, combine, common_shape, value

# Turns that are less probable are left out.
_LEAST = 1e-3


@dataclass(frozen=True, kw_only=True)
class Hint:
    """What is known of the content of an argument.

    Attributes:
        number: what a scalar there is, given its place.
        share: fraction of the bits, and so of the lanes that a mask made of them lets through.
        bits: whether entries are words of a bitmap, so that ``share`` is one of their bits.
        listed: whether entries are places that lie apart in other arguments, in ascending order.
        hashed: whether they are such places in no order.
    """

    number: Callable[[int], float] | None = None
    share: float = 1.0
    bits: bool = False
    listed: bool = False
    hashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a device function.

    Attributes:
        kernel: its name.
        scalars: that the kernel was given.
        program: that calls.
        before: calls of this function by this program.
        result: as it follows from what is known.
    """

    kernel: str
    scalars: Mapping[str, Any]
    program: int
    before: int
    arguments: tuple[Any, ...]
    result: Any


# What is known of a device function's result.
Result = Callable[[Call], Any]


@dataclass(frozen=True, kw_only=True)
class Access:
    """What one statement of one program reads, writes or adds to.

    Attributes:
        kind: ``load``, ``store`` or ``atomic``.
        lanes: elements.
        runs: bytes that lie together.
        apart: what is known of the places: ``no``, they are; ``rising``, they follow each other
            without a gap; ``listed``, they lie apart, in ascending order; ``hashed``, they lie
            apart.
        unique: of the bytes, those that are not the same as another lane's.
    """

    kind: str
    name: str
    size: int
    lanes: float
    run: int
    apart: str
    share: float
    unique: float


@dataclass
class Language:
    """One program's.

    Attributes:
        program: its numbers.
        grid: how many there are.
        hints: by the name of an argument.
        note: is told of every access, and how often it is made.
    """

    program: tuple[int, int, int]
    grid: tuple[int, int, int]
    hints: dict[str, Hint]
    note: Callable[[Access, float], object]
    # Which turns of the loops that are unrolled by Triton this is.
    turns: list[int] = field(default_factory=list)
    # How many turns of the device's loops this one stands for.
    weight: float = 1.0
    # The most turns of a loop of which all are followed, not some for all.
    whole: int = 4
    # Weights outside of the loops that go on by chance, by their places.
    _outside: dict[tuple[str, int], float] = field(default_factory=dict)

    def goes_on(self, place: tuple[str, int], chance: float) -> bool:
        """Whether a loop of which only the chance is known has one more turn, and its weight."""
        outside = self._outside.setdefault(place, self.weight)
        self.weight = outside * chance
        if chance < _LEAST:
            self.weight = self._outside.pop(place)
        return chance >= _LEAST

    def namespace(self) -> SimpleNamespace:
        """What kernels know as ``tl``."""
        import triton.language as real

        names = {n: getattr(real, n) for n in dir(real) if isinstance(getattr(real, n), real.dtype)}
        own = {n: getattr(self, f"_{n}") for n in _FUNCTIONS}
        own |= {n: _lane_by_lane(how) for n, how in _LANE_BY_LANE.items()}
        return SimpleNamespace(**names, **own, constexpr=real.constexpr)

    def _program_id(self, axis: Any) -> Value:
        return value(self.program[int(_plain(axis))], _dtype("int32"))

    def _num_programs(self, axis: Any) -> Value:
        return value(self.grid[int(_plain(axis))], _dtype("int32"))

    def _arange(self, start: Any, end: Any) -> Value:
        known = np.arange(int(_plain(start)), int(_plain(end)), dtype=np.int64)
        return Value(shape=known.shape, known=known, dtype=_dtype("int32"))

    def _static_range(self, *bounds: Any) -> Iterator[int]:
        self.turns.append(0)
        for turn in range(*(int(_plain(b)) for b in bounds)):
            self.turns[-1] = turn
            yield turn
        self.turns.pop()

    def _range(self, *bounds: Any, **_: Any) -> Iterator[Value]:
        chance = bounds[0].chance if isinstance(bounds[0], Value) else None
        if chance is not None:
            outside, turn = self.weight, 0
            while chance(turn) >= _LEAST:
                self.weight = outside * chance(turn)
                yield value(turn, _dtype("int32"))
                turn += 1
            self.weight = outside
            return
        turns = range(*(math.ceil(value(b).number) for b in bounds))
        # Of many turns the first, one in the middle, which stands for all others, and the last.
        chosen = {0: 1.0, len(turns) // 2: len(turns) - 2.0, len(turns) - 1: 1.0}
        if len(turns) <= self.whole:
            chosen = dict.fromkeys(range(len(turns)), 1.0)
        outside = self.weight
        for at, weight in chosen.items():
            self.weight = outside * weight
            yield value(turns[at], _dtype("int32"))
        self.weight = outside

    def _load(self, pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Value:
        self._access("load", pointer, mask)
        hint = self.hints.get(pointer.name, Hint())
        offset = pointer.offset
        shape = common_shape(offset.shape, () if mask is None else value(mask).shape)
        share = hint.share if mask is None else hint.share * _share(mask)
        if not shape and hint.number is not None and offset.known is not None:
            return value(hint.number(int(offset.number)), pointer.element)
        run = 1 if mask is None else value(mask).run
        return Value(
            shape=shape,
            dtype=pointer.element,
            share=share,
            run=run,
            listed=hint.listed,
            hashed=hint.hashed,
            bits=Bits(density=hint.share) if hint.bits else None,
        )

    def _store(self, pointer: Pointer, content: Any, mask: Any = None, **_: Any) -> None:
        self._access("store", pointer, mask, value(content).shape)

    def _atomic(self, pointer: Pointer, content: Any, mask: Any = None, **_: Any) -> Value:
        shape = self._access("atomic", pointer, mask, value(content).shape)
        return Value(shape=shape, dtype=pointer.element)

    _atomic_add = _atomic_or = _atomic_and = _atomic

    def _access(
        self, kind: str, pointer: Pointer, mask: Any, shape: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        offset = pointer.offset
        mask = value(True if mask is None else mask)
        shape = common_shape(shape, offset.shape, mask.shape)
        lanes = float(np.prod(shape))
        unique, share = (
            lanes,
            mask.share if mask.known is None else float(np.broadcast_to(mask.known, shape).mean()),
        )
        size = pointer.tensor.element_size()
        if offset.known is not None:
            places = np.broadcast_to(offset.known, shape)
            if mask.known is not None:
                places = places[np.broadcast_to(mask.known, shape)]
                share = 1.0
                lanes = float(places.size)
            unique = float(np.unique(places).size)
        apart = "no" if offset.known is not None else "rising"
        apart = "hashed" if offset.hashed else "listed" if offset.listed else apart
        self.note(
            Access(
                kind=kind, name=pointer.name, size=size, lanes=lanes * share,
                run=mask.run, apart=apart, share=share, unique=unique * share,
            ),
            self.weight,
        )  # fmt: skip
        return shape

    def _where(self, condition: Any, x: Any, y: Any) -> Value:
        return combine(np.where, condition, x, y, dtype=value(x).dtype or value(y).dtype)

    def _umulhi(self, x: Any, y: Any) -> Value:
        made = combine(operator.mul, x, y)
        # The upper half of a product is how a hash becomes a place.
        return Value(shape=made.shape, dtype=made.dtype, share=made.share, run=1, hashed=True)

    def _cdiv(self, x: Any, y: Any) -> Any:
        return (x + y - 1) // y

    def _zeros(self, shape: Any, dtype: Any) -> Value:
        return self._full(shape, 0, dtype)

    def _full(self, shape: Any, content: Any, dtype: Any) -> Value:
        shape = tuple(int(_plain(s)) for s in shape)
        return Value(shape=shape, known=np.full(shape, value(content).number), dtype=dtype)

    def _zeros_like(self, x: Value) -> Value:
        return self._zeros(x.shape, x.dtype)

    def _reshape(self, x: Value, *shape: Any) -> Value:
        shape = shape[0] if len(shape) == 1 else shape
        return x.reshaped([_plain(s) for s in shape])

    def _broadcast_to(self, x: Any, *shape: Any) -> Value:
        shape = shape[0] if len(shape) == 1 else shape
        return combine(lambda a, b: a | b if a.dtype == bool else a + b, x,
                       self._zeros(shape, value(x).dtype), dtype=value(x).dtype)  # fmt: skip

    def _expand_dims(self, x: Value, axis: Any) -> Value:
        axis = int(_plain(axis)) % (len(x.shape) + 1)
        return x.reshaped((*x.shape[:axis], 1, *x.shape[axis:]))

    def _trans(self, x: Value) -> Value:
        return self._permute(x, (1, 0))

    def _permute(self, x: Value, *axes: Any) -> Value:
        axes = axes[0] if len(axes) == 1 else axes
        order = [int(_plain(axis)) for axis in axes]
        known = None if x.known is None else np.broadcast_to(x.known, x.shape).transpose(order)
        shape = tuple(x.shape[axis] for axis in order)
        return Value(shape=shape, known=known, dtype=x.dtype, share=x.share)

    def _join(self, x: Value, y: Value) -> Value:
        return Value(shape=(*x.shape, 2), dtype=x.dtype, share=max(x.share, y.share))

    def _gather(self, x: Value, index: Value, axis: Any) -> Value:
        return Value(shape=index.shape, dtype=x.dtype, share=x.share, hashed=x.hashed,
                     listed=x.listed)  # fmt: skip

    def _fold(self, how: Callable[..., Any], x: Value, axis: Any) -> Value:
        axis = int(_plain(axis))
        shape = tuple(n for i, n in enumerate(x.shape) if i != axis % len(x.shape))
        if x.known is not None:
            known = how(np.broadcast_to(x.known, x.shape), axis=axis)
            return Value(shape=shape, known=np.asarray(known), dtype=x.dtype)
        if x.share == 0:
            return Value(shape=shape, known=np.zeros(shape, np.int64), dtype=x.dtype)
        return Value(shape=shape, dtype=x.dtype, hashed=x.hashed, listed=x.listed)

    def _sum(self, x: Value, axis: Any) -> Value:
        if x.counted and x.bits is not None and len(x.shape) == 1 and not x.bits.taken:
            return value(32 * x.bits.density * x.shape[0], x.dtype)
        return self._fold(np.sum, x, axis)

    def _max(self, x: Value, axis: Any) -> Any:
        if x.bits is not None and x.share > 0 and len(x.shape) == 1:
            return Value(shape=(), dtype=x.dtype, chance=x.bits.fullest(x.shape[0]))
        return self._fold(np.max, x, axis)

    def _min(self, x: Value, axis: Any) -> Value:
        return self._fold(np.min, x, axis)

    def _cumsum(self, x: Value, axis: Any) -> Value:
        return Value(shape=x.shape, dtype=x.dtype)

    def _debug_barrier(self) -> None:
        pass

    def _static_assert(self, *_: Any, **__: Any) -> None:
        pass


_LANE_BY_LANE: dict[str, Callable[..., Any]] = {
    "minimum": np.minimum, "maximum": np.maximum, "abs": np.abs, "div_rn": operator.truediv,
    "fma": lambda x, y, z: x * y + z,
}  # fmt: skip


def _lane_by_lane(how: Callable[..., Any]) -> Callable[..., Value]:
    return lambda *operands, **_: combine(how, *operands)


_FUNCTIONS = [
    name[1:] for name, made in vars(Language).items()
    if name.startswith("_") and not name.startswith("__") and callable(made)
    and name not in ("_access", "_fold", "_atomic", "_outside")
]  # fmt: skip


def _plain(x: Any) -> Any:
    """A Python number."""
    return getattr(x, "value", x)


def _share(x: Any) -> float:
    x = value(x)
    return x.share if x.known is None else float(np.mean(x.known != 0))


def _dtype(name: str) -> Any:
    import triton.language as real

    return getattr(real, name)
