"""Statements of the kernels' files: where each begins, and in how many loops it is.

Only loops that run on the device count, not ``tl.static_range``, which Triton unrolls.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .sass import Chain

# The folder of the kernels; frames elsewhere, in Triton's own library, are left out of chains.
_FOLDER = "triton_kernels"


@dataclass(frozen=True)
class Place:
    """Of a line: where its statement begins, and the loops around it, by their first lines."""

    line: int
    loops: tuple[int, ...] = ()


@cache
def ours(file: str) -> bool:
    """Whether a file has kernels of ours."""
    return Path(file).parent.name == _FOLDER or file in _MORE


_MORE: set[str] = set()


def add_file(file: str) -> None:
    """Take this file for one with kernels, too."""
    _MORE.add(file)
    ours.cache_clear()


@cache
def places(file: str) -> dict[int, Place]:
    """Of all lines of functions of a file."""
    found: dict[int, Place] = {}

    def visit(body: list[ast.stmt], loops: tuple[int, ...]) -> None:
        for node in body:
            inner = loops
            last = node.end_lineno or node.lineno
            place = Place(node.lineno, loops)
            if isinstance(node, ast.For | ast.While) and not _static(node):
                inner = (*loops, node.body[0].lineno)
                # What a loop's head becomes is executed with its body, but for the first time.
                place = Place(node.body[0].lineno, inner)
            if isinstance(node, ast.For | ast.While | ast.If | ast.FunctionDef | ast.With):
                last = max(node.lineno, node.body[0].lineno - 1)
            if not isinstance(node, ast.FunctionDef):
                for line in range(node.lineno, last + 1):
                    found[line] = place
            for name in ("body", "orelse"):
                some = getattr(node, name, None)
                if isinstance(some, list):
                    visit(some, inner)

    visit(ast.parse(Path(file).read_text()).body, ())
    return found


def _static(node: ast.For | ast.While) -> bool:
    called = getattr(getattr(node, "iter", None), "func", None)
    return getattr(called, "attr", "") == "static_range"


@cache
def name_of(file: str) -> str:
    """Without its folder."""
    return Path(file).name


@cache
def statements(chain: Chain) -> tuple[Chain, tuple[tuple[int, int], ...]]:
    """A chain with every line's statement (0 for none), without frames that are not ours; and the
    loops around, each as the frame's position in the chain and the loop's line."""
    short: list[tuple[str, int]] = []
    loops: list[tuple[int, int]] = []
    for file, line in chain:
        if not ours(file):
            continue
        # The head of a function is no statement: what comes of it may be executed at any time.
        place = places(file).get(line, Place(0))
        loops += [(len(short), loop) for loop in place.loops]
        short.append((name_of(file), place.line))
    return tuple(short), tuple(loops)
