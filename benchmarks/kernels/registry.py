"""The operators that the suite measures, and what each of them has to say about a case.

To add an operator, write a module with ``axes`` and ``problem(case, device)`` (``ops/encode.py``
is one) and add a line to ``OPS``. The contenders of a problem run on the same input, in turns; the
one called ``tagc`` is ours, and speedups are over the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch

from ..timing import nothing
from .case import Case

# name -> module
OPS = {
    "encode": ".ops.encode",
    "decode": ".ops.decode",
    "quantize": ".ops.quantize",
    "dequantize": ".ops.dequantize",
    "quantize_matrix": ".ops.quantize_matrix",
    "dequantize_matrix": ".ops.dequantize_matrix",
}
OURS = "tagc"


def right() -> str | None:
    """The check of what cannot be wrong."""
    return None


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do a case's work.

    Attributes:
        run: the work.
        before: restores the inputs that ``run`` changes; not timed.
        check: after a run, says what is wrong with the result; None if it is right.
        note: which implementation or variant this is.
        details: after a check, further entries for the result.
    """

    run: Callable[[], object]
    before: Callable[[], object] = nothing
    check: Callable[[], str | None] = right
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A case on its device.

    Attributes:
        floor_bytes: bytes that any implementation must read or write.
        contenders: makers by name, called once each; one that raises is reported as failed.
        facts: further entries for the result.
    """

    floor_bytes: int
    contenders: dict[str, Callable[[], Contender]]
    facts: dict[str, Any] = field(default_factory=dict)


class Op(Protocol):
    """What the module of an operator has."""

    axes: tuple[str, ...]  # which of residual, density, symbol, bits and code its cases have

    def problem(self, case: Case, device: torch.device) -> Problem:
        """Inputs and contenders; every tensor is made here, none in a contender's run."""
        ...


def load(name: str) -> Op:
    """The operator of this name."""
    return cast(Op, importlib.import_module(OPS[name], __package__))
