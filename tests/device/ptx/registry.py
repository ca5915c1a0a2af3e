"""Which function emulates an instruction.

A builder takes an instruction and gives a step: a function of the threads and the mask of those
that execute it (None for all). Files of instructions register builders by the opcode's first part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .faults import NotEmulatedError
from .parse import Instruction
from .threads import Threads, operand

Step = Callable[[Threads, "np.ndarray | None"], None]
_BUILDERS: dict[str, Callable[[Instruction], Step]] = {}


def emulates(*bases: str) -> Callable[[Callable[[Instruction], Step]], Callable[..., Step]]:
    """Decorator: builds steps for opcodes that begin with one of ``bases``."""

    def register(builder: Callable[[Instruction], Step]) -> Callable[[Instruction], Step]:
        for base in bases:
            assert base not in _BUILDERS
            _BUILDERS[base] = builder
        return builder

    return register


def step(i: Instruction) -> Step:
    """What an instruction does."""
    if i.base not in _BUILDERS:
        raise NotEmulatedError(f"{i.where}: {i.opcode}")
    try:
        return _BUILDERS[i.base](i)
    except NotEmulatedError as lacking:
        raise NotEmulatedError(
            f"{i.where}: {i.opcode} {', '.join(i.operands)}: {lacking}"
        ) from lacking


def calculation(i: Instruction, function: Callable[..., Any], *widths: int) -> Step:
    """The first operand becomes a function of the others' bits.

    Args:
        widths: bits of the operands.
    """
    target = i.operands[0]
    assert len(i.operands) == len(widths) + 1, i
    inputs = [operand(text, width) for text, width in zip(i.operands[1:], widths, strict=True)]

    def run(t: Threads, mask: np.ndarray | None) -> None:
        t.write(target, function(*(x(t) for x in inputs)), mask)

    return run


def need(condition: bool, what: str) -> None:
    """What an emulated instruction must be like."""
    if not condition:
        raise NotEmulatedError(what)
