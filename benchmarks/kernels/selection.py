"""Which cases run: a choice that shows every axis, a quick one, or the whole product."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from .case import Case
from .ops.codecs import CODES
from .registry import OPS, load

# log2 of the number of elements, the one at which the other axes vary first.
_SIZES = {"cpu": (22, 24, 20), "cuda": (26, 28, 24, 22, 20)}
_QUICK = {"cpu": (20, 22), "cuda": (22, 26)}
_DTYPES = ("float32", "bfloat16")
_DENSITIES = (0.05, 0.01)
_BITS = (4, 8)
_SYMBOLS = ("int8x4", "int16x2", "int32x1")
_AXES: dict[str, tuple[Any, ...]] = {
    "residual": _DTYPES,
    "density": _DENSITIES,
    "symbol": _SYMBOLS,
    "bits": _BITS,
    "code": tuple(CODES),
}


def select(
    choice: str,
    device: str,
    patterns: Iterable[str] = (),
    sizes: Sequence[int] | None = None,
) -> list[Case]:
    """The cases of a choice, most telling ones first, each once.

    Args:
        choice: ``default``: all sizes and densities with the first dtypes and symbol, then all
            symbols, bits, codes and pairs of dtypes, at one size; ``quick``: two small sizes;
            ``full``: the whole product.
        device: ``cpu`` or ``cuda``.
        sizes: log2 of the numbers of elements, in place of the choice's own.
        patterns: globs over :attr:`Case.name`, or parts of it; a case that matches any stays.
    """
    own = {"default": _SIZES, "quick": _QUICK, "full": _SIZES}[choice][device]
    cases = {"default": _default, "quick": _quick, "full": _full}[choice](tuple(sizes or own))
    patterns = list(patterns)
    return [
        case
        for case in dict.fromkeys(cases)
        if not patterns or any(fnmatchcase(case.name, f"*{pattern}*") for pattern in patterns)
    ]


def _case(op: str, size: int, **values: Any) -> Case:
    axes = load(op).axes
    chosen = {axis: values.pop(axis, _AXES[axis][0]) for axis in _AXES}
    return Case(op=op, numel=1 << size, **{a: chosen[a] for a in axes}, **values)


def _default(sizes: tuple[int, ...]) -> Iterator[Case]:
    for size, density, op in product(sizes, _DENSITIES, OPS):
        yield _case(op, size, density=density)
    for symbol, op in product(_SYMBOLS, OPS):
        yield _case(op, sizes[0], symbol=symbol)
    for bits, op in product(_BITS, OPS):
        yield _case(op, sizes[0], bits=bits)
    for code, op in product(CODES, OPS):
        yield _case(op, sizes[0], code=code)
    for gradient, residual, op in product(_DTYPES, _DTYPES, OPS):
        yield _case(op, sizes[0], gradient=gradient, residual=residual)


def _quick(sizes: tuple[int, ...]) -> Iterator[Case]:
    for size, density, op in product(sizes, _DENSITIES, OPS):
        yield _case(op, size, density=density)


def _full(sizes: tuple[int, ...]) -> Iterator[Case]:
    axes = (sizes, _DENSITIES, _SYMBOLS, _BITS, CODES, _DTYPES, _DTYPES, OPS)
    for size, density, symbol, bits, code, gradient, residual, op in product(*axes):
        yield _case(
            op, size, density=density, symbol=symbol, bits=bits, code=code,
            gradient=gradient, residual=residual,
        )  # fmt: skip
