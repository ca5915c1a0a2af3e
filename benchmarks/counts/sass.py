"""Machine code: instructions with their lines in the source, basic blocks and cycles.

The disassembler is the one that Triton brings with it. It prints for every instruction from which
line of which file it came, and through which calls of inlined functions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import networkx
from triton import __file__ as triton

# File and line, of the kernel first, of the innermost inlined function last.
Chain = tuple[tuple[str, int], ...]

_LABEL = re.compile(r"^(\.[\w.$]+):")
_LINE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)( inlined at)?')
# Predicate, opcode, operands.
_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?(\S+?)(?:\s+(.*?))?\s*;"
)
_TARGET = re.compile(r"^(.*)`\((\.[\w.$]+)\)")
# What follows is not what comes next in the program.
_ENDS = ("EXIT", "RET", "BRA", "BRX", "JMP", "CALL", "BREAK", "KILL")


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        opcode: with its modifiers, such as ``LDG.E.128``.
        chain: where it came from; empty if the compiler does not say.
    """

    opcode: str
    chain: Chain

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]


@dataclass
class Block:
    """Instructions that are executed one after the other.

    Attributes:
        next: numbers of the blocks that may follow.
        depth: cycles of the control flow graph around it, one inside the other.
        cycle: number of the innermost one; -1 for none.
    """

    instructions: list[Instruction] = field(default_factory=list)
    next: list[int] = field(default_factory=list)
    depth: int = 0
    cycle: int = -1


def disassemble(cubin: bytes) -> str:
    """What ``nvdisasm`` prints."""
    tool = Path(triton).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), "-c", "-gi", file.name], capture_output=True, text=True, check=False
        )
    assert "/*0000*/" in done.stdout, f"nvdisasm printed no instructions: {done.stderr}"
    return done.stdout


def blocks_of(text: str) -> list[Block]:
    """Basic blocks of a disassembled kernel, in the order of the program, with their cycles."""
    blocks = [Block()]
    labels: dict[str, int] = {}
    # By block, where it goes on; and those that the next one does not follow.
    targets: dict[int, str] = {}
    final: set[int] = set()
    chain: Chain = ()
    frames: list[tuple[str, int]] = []
    for line in text.splitlines():
        if found := _LINE.match(line):
            frames.append((found[1], int(found[2])))
            if not found[3]:
                # The last inlined function is the first line.
                chain, frames = tuple(reversed(frames)), []
        elif found := _LABEL.match(line):
            if blocks[-1].instructions:
                blocks.append(Block())
            labels[found[1]] = len(blocks) - 1
        elif found := _INSTRUCTION.match(line):
            one = Instruction(found[2], chain)
            blocks[-1].instructions.append(one)
            if one.name in _ENDS:
                target = _TARGET.match(found[3] or "")
                if target and one.name in ("BRA", "BRX", "JMP"):
                    targets[len(blocks) - 1] = target[2]
                # A uniform predicate is an operand: BRA.U UP0, `(.L_x_1).
                decides = found[1] or (one.name == "BRA" and target and target[1])
                # Of a division's slow path, which returns to the next instruction, nothing is
                # followed.
                if not decides and one.name != "CALL":
                    final.add(len(blocks) - 1)
                blocks.append(Block())
    if not blocks[-1].instructions:
        blocks.pop()
    for number, block in enumerate(blocks):
        to = labels.get(targets.get(number, ""), len(blocks))
        following = [*([] if number in final else [number + 1]), to]
        block.next += [n for n in following if n < len(blocks)]
    _find_cycles(blocks)
    return blocks


def _find_cycles(blocks: list[Block]) -> None:
    """Number the cycles and those inside of them, once what leads back to their head is cut."""
    numbers = iter(range(len(blocks)))

    def inside(graph: networkx.DiGraph) -> None:
        for part in networkx.strongly_connected_components(graph):
            cycle = networkx.DiGraph(graph.subgraph(part))
            if not cycle.edges:
                continue
            number = next(numbers)
            for n in part:
                blocks[n].depth += 1
                blocks[n].cycle = number
            cycle.remove_edges_from(list(cycle.in_edges(min(part))))
            inside(cycle)

    edges = ((n, m) for n, block in enumerate(blocks) for m in block.next)
    inside(networkx.DiGraph(edges))
