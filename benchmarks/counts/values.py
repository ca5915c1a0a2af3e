"""What is known of a value while a kernel's control flow is followed: :mod:`.follow`.

Program numbers, sizes and strides are known, and all that is computed from them alone; so are
places and masks of dense accesses, and the bounds of most loops. What comes out of memory is not
known: such a value has a shape, and a ``share``, the fraction of its lanes that are not zero.
"""

from __future__ import annotations

import ast
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

_RANGES = {f"{sign}int{bits}": (bits, not sign) for bits in (8, 16, 32, 64) for sign in ("", "u")}


class UnknownError(RuntimeError):
    """A kernel asks for a number that depends on what is in memory."""


@dataclass(frozen=True, kw_only=True)
class Bits:
    """Words of 32 bits, of which each is set with the same chance, on its own.

    Attributes:
        density: that chance.
        taken: lowest set bits that were taken out of every word that had them.
    """

    density: float
    taken: int = 0

    @property
    def some(self) -> float:
        """How probable it is that a word has a bit left."""
        return self.fullest(1)(0)

    def fullest(self, lanes: int) -> Callable[[int], float]:
        """How probable it is that the fullest of so many words has more than ``turn`` bits left."""

        def more(turn: int) -> float:
            return 1 - binomial_at_most(self.taken + turn, 32, self.density) ** lanes

        return more


@cache
def binomial_at_most(most: int, number: int, chance: float) -> float:
    """How probable it is that of so many events, each with this chance, at most ``most`` occur."""
    if chance in (0.0, 1.0) or most >= number:
        return float(chance == 0 or most >= number)
    odds = math.log(chance) - math.log1p(-chance)
    first = number * math.log1p(-chance)
    choices = math.lgamma(number + 1)
    return min(
        1.0,
        sum(
            math.exp(first + k * odds + choices - math.lgamma(k + 1) - math.lgamma(number - k + 1))
            for k in range(most + 1)
        ),
    )


@dataclass(eq=False)
class Value:
    """A scalar or a tensor.

    Attributes:
        known: its numbers; None if they depend on memory.
        dtype: Triton's.
        share: fraction of the lanes that are true or not zero.
        run: neighbouring lanes that are so together.
        hashed: whether it is a hash, so that neighbours have nothing to do with each other.
        listed: whether it is an entry of a list of places that lie apart.
        bounded: whether a known condition is a part of it, so that a loop ends.
        bits: of words of a bitmap, see :class:`Bits`.
        less: whether it is such a word less one, which clears its lowest bit.
        counted: whether it is the number of bits of such a word.
        chance: of a condition, or of a number of turns that is tested turn by turn: how probable it
            is to go on; None if nothing is known.
        place: of an entry of a list of lengths: the sum of those before it, see :mod:`.work`.
        apart: whether the lanes that it lets through have nothing to do with other conditions.
    """

    shape: tuple[int, ...]
    known: np.ndarray | None = None
    dtype: Any = None
    share: float = 1.0
    run: int = 1
    hashed: bool = False
    listed: bool = False
    bounded: bool = False
    bits: Bits | None = None
    less: bool = False
    counted: bool = False
    chance: Callable[[int], float] | None = None
    place: float | None = None
    apart: bool = False

    @property
    def number(self) -> Any:
        """Of a scalar that is known.

        Raises:
            UnknownError: if it is not.
        """
        if self.known is None:
            raise UnknownError(f"a number out of memory decides, at {_where()}")
        return self.known.reshape(-1)[0].item()

    @property
    def numel(self) -> int:
        """Lanes."""
        return math.prod(self.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        """In another dtype; what is known of a float is not kept."""
        known, name = self.known, str(dtype)
        if known is not None and known.dtype.kind not in "biu" and bitcast:
            known = None
        if known is not None:
            if name in _RANGES:
                bits, signed = _RANGES[name]
                known = known.astype(np.int64)
                if bits < 64:
                    known = known & ((1 << bits) - 1)
                    if signed:
                        known = known - ((known >> (bits - 1)) << bits)
            elif bitcast:
                known = None
            else:
                known = known.astype(np.float64)
        return replace(self, known=known, dtype=dtype)

    def __bool__(self) -> bool:
        if self.known is None and self.chance is not None:
            frame = _caller()
            return _CHANCES[-1]((frame.f_code.co_filename, frame.f_lineno), self.chance(0))
        if self.known is None:
            return self.bounded or _assumed()
        return bool(self.known.all())

    def __index__(self) -> int:
        return int(self.number)

    def __getitem__(self, keys: Any) -> Value:
        keys = keys if isinstance(keys, tuple) else (keys,)
        shape, rest = [], list(self.shape)
        for key in keys:
            shape.append(1 if key is None else rest.pop(0))
        return self.reshaped((*shape, *rest))

    def reshaped(self, shape: Sequence[Any]) -> Value:
        """In another shape of as many lanes."""
        shape = tuple(int(s) for s in shape)
        known = None if self.known is None else np.broadcast_to(self.known, self.shape)
        return replace(self, shape=shape, known=None if known is None else known.reshape(shape))


def value(x: Any, dtype: Any = None) -> Value:
    """A number as a value."""
    if isinstance(x, Value):
        return x
    if hasattr(x, "value"):
        x = x.value
    return Value(shape=(), known=np.asarray(x), dtype=dtype)


@dataclass(eq=False)
class Pointer:
    """Places in the memory of an argument.

    Attributes:
        name: of the argument.
        offset: in elements.
    """

    name: str
    tensor: torch.Tensor
    element: Any
    offset: Value = field(default_factory=lambda: value(0))

    @property
    def dtype(self) -> Any:
        """As Triton's pointer types have it."""
        return _PointerType(self.element)

    def __add__(self, other: Any) -> Pointer:
        return replace(self, offset=combine(operator.add, self.offset, other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return replace(self, offset=combine(operator.sub, self.offset, other))

    def __getitem__(self, keys: Any) -> Pointer:
        return replace(self, offset=self.offset[keys])


@dataclass(frozen=True)
class _PointerType:
    element_ty: Any


def combine(how: Callable[..., Any], *operands: Any, dtype: Any = None) -> Value:
    """Lane by lane, in the common shape; known if all of them are."""
    values = [value(x) for x in operands]
    shape = common_shape(*(v.shape for v in values))
    unknown = [v for v in values if v.known is None]
    if dtype is None:
        dtype = _common([v.dtype for v in values if v.dtype is not None])
    if not unknown:
        known = how(*(v.known for v in values))
        return Value(shape=shape, known=np.asarray(known), dtype=dtype)
    # A mask that is false anywhere stays false, whatever else is unknown.
    if how is operator.and_ and any(
        v.known is not None and v.known.dtype == bool and not v.known.any() for v in values
    ):
        return Value(shape=shape, known=np.zeros(shape, bool), dtype=dtype)
    shares = [v.share for v in unknown]
    lone = [v.share for v in unknown if v.apart]
    if how is operator.sub and all(v.place is not None for v in values):
        return value(values[0].place - values[1].place, dtype)  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]
    bits, less = _bits(how, values, unknown)
    if bits is not None and how is operator.ne:
        share = bits.some
    elif lone and how is operator.ne:
        share = lone[0]
    elif lone and how is operator.and_:
        share = min([v.share for v in unknown if not v.apart] or [1.0]) * min(lone)
    elif how is operator.or_:
        share = min(1.0, max(shares))
    elif how is operator.eq and any(v.known is not None and not v.known.any() for v in values):
        share = 1 - min(shares) if min(shares) < 1 else 1.0
    elif (
        how in (operator.lt, operator.le) and values[-1].known is not None and _positive(values[-1])
    ):
        share = 1.0  # a bound; what was not loaded is 0
    else:
        share = min(shares)
    run = 1
    for v in unknown:
        run = max(run, v.run)
        if v.bits is not None:
            continue  # its bits are set independently
        if (v.share < 1 or v.listed or v.hashed) and v.shape and shape[-1] > v.shape[-1] == 1:
            run = max(run, v.run * shape[-1])
    return Value(
        shape=shape, dtype=dtype, share=share, run=run,
        hashed=any(v.hashed for v in unknown), listed=any(v.listed for v in unknown),
        bounded=how is operator.and_ and len(unknown) < len(values),
        bits=bits, less=less, apart=bool(lone) and how is operator.ne,
        chance=unknown[0].chance if how is operator.gt and len(unknown) == 1 else None,
    )  # fmt: skip


def _bits(
    how: Callable[..., Any], values: list[Value], unknown: list[Value]
) -> tuple[Bits | None, bool]:
    """Of words of a bitmap, what an operation leaves of them, and whether that is one less."""
    words = [v for v in unknown if v.bits is not None]
    if not words or any(v.counted for v in words):
        return None, False
    bits = words[-1].bits
    if how is operator.and_ and len(words) == 2 and words[0].less != words[1].less:
        assert bits is not None
        return replace(bits, taken=bits.taken + 1), False
    if len(unknown) == len(words) and (how is np.where or how is operator.ne):
        return bits, False
    if len(words) == 1 and len(values) == 2 and not words[0].less:
        # Of the word without the bits past the bitmap's end; and of the word less one.
        if how is operator.and_ and len(unknown) == 1 and not _negative(values[-1]):
            return bits, False
        if how is operator.sub and len(unknown) == 1 and values[0] is words[0]:
            return bits, True
    return None, False


def common_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """What they are broadcast to."""
    different = {*shapes, ()}
    if len(different) <= 2:
        return max(different, key=len)
    return np.broadcast_shapes(*different)


def _positive(v: Value) -> bool:
    return v.known is not None and bool((v.known > 0).all())


def _negative(v: Value) -> bool:
    return v.known is not None and bool((v.known < 0).all())


def _common(dtypes: list[Any]) -> Any:
    floats = [d for d in dtypes if "fp" in str(d) or "bf" in str(d)]
    return (floats or dtypes or [None])[0]


def _operators() -> None:
    def both(how: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Value, other: Any) -> Any:
            if isinstance(other, Pointer):
                return NotImplemented
            return combine(how, self, other)

        return forward

    def swapped(how: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, other: combine(how, other, self)

    # A GPU divides integers towards zero; those here are not negative.
    names = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift",
             "rshift")  # fmt: skip
    for name in names:
        how = getattr(operator, name if name not in ("and", "or") else f"{name}_")
        setattr(Value, f"__{name}__", both(how))
        setattr(Value, f"__r{name}__", swapped(how))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__{name}__", both(getattr(operator, name)))
    Value.__hash__ = object.__hash__
    for name in ("neg", "invert"):
        how = getattr(operator, name)
        setattr(Value, f"__{name}__", lambda self, how=how: combine(how, self))


_operators()


# Of the program that runs: what is asked about a condition, with its place, and how probable it is.
_CHANCES: list[Callable[[tuple[str, int], float], bool]] = []


def ask_chances(asked: Callable[[tuple[str, int], float], bool]) -> None:
    """From now on, ``asked`` decides conditions of which only the chance is known."""
    _CHANCES[:] = [asked]


def _assumed() -> bool:
    frame = _caller()
    file, line = frame.f_code.co_filename, frame.f_lineno
    if line not in branches(file):
        raise UnknownError(f"what is in memory decides, at {_where()}")
    return branches(file)[line]


@cache
def branches(file: str) -> dict[int, bool]:
    """Whether the branch at a line of a kernel's file is taken, whatever is in memory: not where
    all that it does is to leave the kernel, nor where the line says that it is ``# seldom``."""
    found: dict[int, bool] = {}
    text = Path(file).read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If):
            leaves = all(isinstance(x, ast.Return) for x in node.body)
            seldom = lines[node.test.lineno - 1].endswith("# seldom")
            for line in range(node.test.lineno, (node.test.end_lineno or node.test.lineno) + 1):
                found[line] = not leaves and not seldom
    return found


def _caller() -> Any:
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or "numpy" in frame.f_code.co_filename:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame


def _where() -> str:
    frame = _caller()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
