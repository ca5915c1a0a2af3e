"""PTX as Triton writes it: one kernel's text to a list of instructions.

Worked example: ``@%p1 ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 8 ];`` becomes an instruction with
the opcode ``ld.global.v2.b32``, the operands ``{ %r1, %r2 }`` and ``[ %rd1 + 8 ]``, and the
predicate ``%p1``. The ``.loc`` before it gives its place in the kernel's source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

_WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "f32": 32, "f64": 64}


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: with all modifiers, ``ld.global.b32``.
        operands: their texts.
        predicate: register that says which threads execute it, or None for all.
        negated: whether those execute it for which the predicate does not hold.
        where: file and line of the kernel's source.
    """

    opcode: str
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    where: str

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The opcode's parts; ``shared::cta`` is ``shared``."""
        return tuple(part.split("::")[0] for part in self.opcode.split("."))

    @property
    def base(self) -> str:
        """The first part."""
        return self.parts[0]

    @property
    def kind(self) -> str:
        """Letter of the type: ``b``its, ``u``nsigned, ``s``igned or ``f``loat; or ``pred``."""
        return self.parts[-1] if self.parts[-1] == "pred" else self.parts[-1][0]

    @property
    def bits(self) -> int:
        """Width of the type; 0 where the opcode has none."""
        found = re.fullmatch(r"[busf](\d+)", self.parts[-1])
        return int(found[1]) if found else 0


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One compiled kernel.

    Attributes:
        parameters: names in order.
        widths: bits of registers by the prefix of their names; 1 for predicates.
        labels: places in ``code``.
    """

    name: str
    parameters: tuple[str, ...]
    widths: dict[str, int]
    labels: dict[str, int]
    code: tuple[Instruction, ...]

    def width(self, register: str) -> int:
        """Bits of a register."""
        return self.widths[register.rstrip("0123456789")]


def parse(ptx: str) -> Kernel:
    """The one kernel in a module's text."""
    begin = re.search(r"\.visible \.entry (\w+)\(", ptx)
    assert begin, "no kernel"
    head, body = ptx[begin.end() :].split("\n{", 1)
    body = body[: body.index("\n}")]
    files = {n: PurePath(path).name for n, path in re.findall(r'\.file\s+(\d+) "([^"]*)"', ptx)}
    widths: dict[str, int] = {}
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    where = begin[1]
    for line in body.splitlines():
        text = line.split("//")[0].strip()
        place = re.match(r"\.loc\s+(\d+) (\d+)", text)
        if place and place[2] != "0":
            where = f"{files.get(place[1], '?')}:{place[2]}"
        register = re.match(r"\.reg \.(\w+)\s+(%\w+?)<", text)
        if register:
            widths[register[2]] = _WIDTHS[register[1]]
        label = re.fullmatch(r"(\$\w+):", text)
        if label:
            labels[label[1]] = len(code)
        elif text and not text.startswith(".") and text not in "{}":
            assert text.endswith(";"), f"an instruction of several lines: {text!r}"
            code.extend(_instruction(t.strip(), where) for t in text.split(";") if t.strip())
    return Kernel(
        name=begin[1],
        parameters=tuple(re.findall(r"\.param [^,)]*?(\w+)(?=[,\n)])", head)),
        widths=widths, labels=labels, code=tuple(code),
    )  # fmt: skip


def _instruction(text: str, where: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", text)
    assert found, text
    return Instruction(
        opcode=found[3],
        operands=tuple(o.strip() for o in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", found[4])),
        predicate=found[2],
        negated=bool(found[1]),
        where=where,
    )


def elements(operand: str) -> list[str]:
    """Registers of an operand: ``{ %r1, %r2 }`` are two."""
    return [e.strip() for e in operand.strip("{}").split(",")]
