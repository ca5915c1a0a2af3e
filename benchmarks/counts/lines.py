"""Statements of the kernels' files: where each begins, and in how many loops it is.

Only loops that run on the device count, not ``tl.static_range``, which Triton unrolls.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

from triton import __file__ as triton

from .sass import Chain

_LIBRARY = str(Path(triton).parent)


class Place(NamedTuple):
    """Of a line.

    Attributes:
        line: where its statement begins.
        loops: around it.
        head: whether it is a loop's head. What that becomes is executed with the loop's first
            statement, but for the first time, so ``line`` is that statement's.
    """

    line: int
    loops: int = 0
    head: bool = False


@cache
def places(file: str) -> dict[int, Place]:
    """Of all lines of functions of a file."""
    found: dict[int, Place] = {}

    def visit(body: list[ast.stmt], loops: int) -> None:
        for node in body:
            inner, place, last = loops, Place(node.lineno, loops), node.end_lineno or node.lineno
            if isinstance(node, ast.For | ast.While) and not _static(node):
                inner += 1
                place = Place(node.body[0].lineno, inner, head=True)
            if isinstance(node, ast.For | ast.While | ast.If | ast.FunctionDef):
                last = max(node.lineno, node.body[0].lineno - 1)
                visit(node.body, inner)
            if isinstance(node, ast.For | ast.While | ast.If):
                visit(node.orelse, inner)
            if not isinstance(node, ast.FunctionDef):
                for line in range(node.lineno, last + 1):
                    found.setdefault(line, place)

    visit(ast.parse(Path(file).read_text()).body, 0)
    return found


def _static(node: ast.For | ast.While) -> bool:
    called = getattr(getattr(node, "iter", None), "func", None)
    return getattr(called, "attr", "") == "static_range"


@cache
def name_of(file: str) -> str:
    """Without its folder."""
    return Path(file).name


@cache
def statements(chain: Chain) -> tuple[Chain, int]:
    """A chain with every line's statement, without frames of Triton's own library; and how many
    loops are around it."""
    short: list[tuple[str, int]] = []
    loops = 0
    for file, line in chain:
        if not file.startswith(_LIBRARY):
            # The head of a function is no statement: what comes of it may be executed at any time.
            place = places(file).get(line, Place(0))
            loops += place.loops
            short.append((name_of(file), place.line))
    while short and not short[-1][1]:
        short.pop()
    return tuple(short), loops
