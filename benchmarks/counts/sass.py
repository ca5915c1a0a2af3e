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

# File and line, of the kernel first, of the innermost inlined function last.
Chain = tuple[tuple[str, int], ...]

_LABEL = re.compile(r"^(\.[\w.$]+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(.*?)\s*;")
_LINE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)( inlined at)?')
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_TARGET = re.compile(r"`\((\.[\w.$]+)\)")
# What follows is not what comes next in the program.
_ENDS = ("EXIT", "RET", "BRA", "BRX", "JMP", "CALL", "BREAK", "KILL")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: with its modifiers, such as ``LDG.E.128``.
        guarded: whether a predicate decides.
        target: label that it may go on at.
        chain: where it came from; empty if the compiler does not say.
    """

    opcode: str
    guarded: bool
    target: str | None
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

    instructions: list[Instruction]
    next: list[int] = field(default_factory=list)
    depth: int = 0
    cycle: int = -1


def disassemble(cubin: bytes) -> str:
    """What ``nvdisasm`` prints."""
    from triton import __file__ as triton

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
    blocks: list[Block] = [Block([])]
    labels: dict[str, int] = {}
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
                blocks.append(Block([]))
            labels[found[1]] = len(blocks) - 1
        elif found := _INSTRUCTION.match(line):
            words = found[1]
            bare = _PREDICATE.sub("", words)
            target = _TARGET.search(bare)
            # A uniform predicate is an operand: BRA.U UP0, `(.L_x_1).
            decided = bare != words or (
                bare.startswith("BRA") and not re.match(r"\S+\s+`\(", bare) and target is not None
            )
            one = Instruction(
                opcode=bare.split()[0],
                guarded=decided,
                target=target[1] if target else None,
                chain=chain,
            )
            blocks[-1].instructions.append(one)
            if one.name in _ENDS:
                blocks.append(Block([]))
    if not blocks[-1].instructions:
        last = len(blocks) - 1
        blocks.pop()
        labels = {name: at for name, at in labels.items() if at != last}
    for number, block in enumerate(blocks):
        end = block.instructions[-1]
        # Of a division's slow path, which returns to the next instruction, nothing is followed.
        falls = end.name not in _ENDS or end.guarded or end.name == "CALL"
        if falls and number + 1 < len(blocks):
            block.next.append(number + 1)
        if end.name in ("BRA", "BRX", "JMP") and end.target in labels:
            block.next.append(labels[end.target])
    _find_cycles(blocks)
    return blocks


def _find_cycles(blocks: list[Block]) -> None:
    """Number the cycles and those inside of them, once what leads back to their head is cut."""
    count = 0

    def inside(members: set[int], cut: set[tuple[int, int]]) -> None:
        nonlocal count
        for part in _components(blocks, members, cut):
            some = next(iter(part))
            itself = some in blocks[some].next and (some, some) not in cut
            if len(part) == 1 and not itself:
                continue
            for number in part:
                blocks[number].depth += 1
                blocks[number].cycle = count
            count += 1
            # A block that ends where it began, as a kernel's last line does, is no loop to count.
            head = min(part)
            inside(part, cut | {(n, head) for n in part})

    inside(set(range(len(blocks))), set())


def _components(
    blocks: list[Block], members: set[int], cut: set[tuple[int, int]]
) -> list[set[int]]:
    """Strongly connected ones (R. Tarjan, 1972), without recursion."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on: set[int] = set()
    found: list[set[int]] = []

    def following(n: int) -> list[int]:
        return [m for m in blocks[n].next if m in members and (n, m) not in cut]

    for root in sorted(members):
        if root in index:
            continue
        work = [(root, iter(following(root)))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on.add(root)
        while work:
            n, rest = work[-1]
            for m in rest:
                if m not in index:
                    index[m] = low[m] = len(index)
                    stack.append(m)
                    on.add(m)
                    work.append((m, iter(following(m))))
                    break
                if m in on:
                    low[n] = min(low[n], index[m])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[n])
                if low[n] == index[n]:
                    part: set[int] = set()
                    while n not in part:
                        part.add(m := stack.pop())
                        on.discard(m)
                    found.append(part)
    return found
