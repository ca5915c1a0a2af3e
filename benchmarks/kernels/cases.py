"""The cases: one operator on one input each, and which of them run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch

from tagc.ops.matrix import BITS, GROUP

# What a code of a matrix is, by name: bits of an element, or neighbours that share a code.
CODES = {f"int{bits}": {"bits": bits} for bits in sorted(BITS, reverse=True)}
CODES |= {f"group{GROUP}": {"group": GROUP}}
# The operators, and what of a case each depends on besides its size and the gradient's dtype.
OPS = {
    "encode": ("residual", "density", "symbol"),
    "decode": ("residual", "density", "symbol"),
    "quantize": ("residual", "bits"),
    "dequantize": ("bits",),
    "quantize_matrix": ("residual", "code"),
    "dequantize_matrix": ("code",),
}
_DTYPES = ("float32", "bfloat16")
_AXES: dict[str, tuple[Any, ...]] = {
    "residual": _DTYPES,
    "density": (0.05, 0.01),
    "symbol": ("int8x4", "int16x2", "int32x1"),
    "bits": (4, 8),
    "code": tuple(CODES),
}
# log2 of the number of elements, the one at which the other axes vary first.
_SIZES = {"cpu": (22, 24, 20), "cuda": (26, 28, 24, 22, 20)}
_QUICK = {"cpu": (20, 22), "cuda": (22, 26)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operator on one input.

    Attributes:
        op: a name in ``OPS``.
        numel: elements of the gradient of one destination.
        gradient: dtype of the gradient.
        residual, density, symbol, bits, code: dtype of the residual, fraction kept, symbol, bits
            of a quantized element, code of a matrix (a key of ``CODES``); None where the operator
            has no such thing.
    """

    op: str
    numel: int
    gradient: str = "float32"
    residual: str | None = None
    density: float | None = None
    symbol: str | None = None
    bits: int | None = None
    code: str | None = None

    @property
    def name(self) -> str:
        """What ``--filter`` matches, such as ``encode/2^22/float32/float32/5%/int8x4``."""
        exponent = self.numel.bit_length() - 1
        parts = [
            self.op,
            f"2^{exponent}" if self.numel == 1 << exponent else str(self.numel),
            self.gradient,
            self.residual,
            None if self.density is None else f"{100 * self.density:g}%",
            self.symbol,
            None if self.bits is None else f"int{self.bits}",
            self.code,
        ]
        return "/".join(part for part in parts if part is not None)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of the gradient and of the residual, which is float32 where a case has none."""
        return getattr(torch, self.gradient), getattr(torch, self.residual or "float32")


def select(
    device: str,
    patterns: Iterable[str] = (),
    sizes: Sequence[int] | None = None,
    *,
    quick: bool = False,
) -> list[Case]:
    """The cases, most telling ones first, each once: all sizes and densities with the first value
    of every other axis, then all values of each axis at one size.

    Args:
        device: ``cpu`` or ``cuda``.
        patterns: globs over :attr:`Case.name`, or parts of it; a case that matches any stays.
        sizes: log2 of the numbers of elements, in place of the device's own.
        quick: two small sizes, and no other axis than the density.
    """
    patterns = list(patterns)
    own = (_QUICK if quick else _SIZES)[device]
    return [
        case
        for case in dict.fromkeys(_cases(sizes or own, quick))
        if not patterns or any(fnmatchcase(case.name, f"*{pattern}*") for pattern in patterns)
    ]


def _cases(sizes: Sequence[int], quick: bool) -> Iterator[Case]:
    for size, density, op in product(sizes, _AXES["density"], OPS):
        yield _case(op, size, density=density)
    if quick:
        return
    for axis in ("symbol", "bits", "code"):
        for value, op in product(_AXES[axis], OPS):
            yield _case(op, sizes[0], **{axis: value})
    for gradient, residual, op in product(_DTYPES, _DTYPES, OPS):
        yield _case(op, sizes[0], gradient=gradient, residual=residual)


def _case(op: str, size: int, gradient: str = "float32", **values: Any) -> Case:
    chosen = {axis: values.get(axis, _AXES[axis][0]) for axis in OPS[op]}
    return Case(op=op, numel=1 << size, gradient=gradient, **chosen)
