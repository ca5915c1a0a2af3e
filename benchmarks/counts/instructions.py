"""Instructions that a launch executes, by pipe: the machine code times what :mod:`.follow` found.

A block of the machine code is executed as often as most of the statements are that its
instructions come from. Compilers move instructions out of loops, so only statements that are in
as few loops as the block is in cycles have a say. Loops that the assembler unrolled have several
copies of their body: those are recognized by accesses to memory, of which the PTX has fewer.
Slow paths of divisions, behind a call, count as never executed.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping

from ..compiled import Compiled
from .follow import Followed
from .lines import name_of, statements
from .pipes import passes, pipe_of
from .sass import Block, Chain, blocks_of, disassemble

_BLOCKS: dict[bytes, list[Block]] = {}


def blocks(kernel: Compiled) -> list[Block]:
    """Of the machine code, disassembled once in a process."""
    if kernel.cubin not in _BLOCKS:
        _BLOCKS[kernel.cubin] = blocks_of(disassemble(kernel.cubin))
    return _BLOCKS[kernel.cubin]


def executed(kernel: Compiled, followed: Followed) -> tuple[dict[str, float], dict[str, float]]:
    """Warp instructions of all programs: by opcode, and by pipe (twice what passes twice)."""
    code = blocks(kernel)
    opcodes: defaultdict[str, float] = defaultdict(float)
    pipes: defaultdict[str, float] = defaultdict(float)
    for block, times in zip(code, frequencies(kernel, code, followed), strict=True):
        for one in block.instructions:
            opcodes[one.opcode] += times * kernel.warps
            pipes[pipe_of(one.opcode)] += times * kernel.warps * passes(one.opcode)
    return opcodes, pipes


def frequencies(kernel: Compiled, code: list[Block], followed: Followed) -> list[float]:
    """How often all programs together execute each block."""
    # The kernel's first statement: once in each program.
    entry = followed.executions[min(c for c in followed.executions if len(c) == 1)]
    copies = _copies(kernel, code)
    reached = _reached(code)
    found: list[float] = []
    for number, block in enumerate(code):
        if number not in reached or any(i.name == "CALL" for i in block.instructions):
            found.append(0.0)
            continue
        votes: list[float] = []
        inner: list[float] = []
        for one in block.instructions:
            chain, loops = statements(one.chain)
            times = _times(chain, followed.executions)
            if times is not None:
                (votes if len(loops) <= block.depth else inner).append(times)
        # Around a loop: not more often than its body is executed.
        times = statistics.median_low(votes or inner or [entry])
        if block.depth == 0:
            times = min(times, entry)
        else:
            times /= copies.get(block.cycle, 1.0)
        found.append(times)
    return found


def _times(chain: Chain, executions: Mapping[Chain, float]) -> float | None:
    """Of a statement, or of the call that it is in; None if it came from no statement."""
    while chain and not chain[-1][1]:
        chain = chain[:-1]
    for length in range(len(chain), 0, -1):
        if chain[:length] in executions:
            return executions[chain[:length]]
    return 0.0 if chain else None


def _reached(code: list[Block]) -> set[int]:
    """Blocks that are reached without a call."""
    seen, todo = {0}, [0]
    while todo:
        number = todo.pop()
        if any(i.name == "CALL" for i in code[number].instructions):
            continue
        for following in code[number].next:
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return seen


_PTX_LINE = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_PTX_ACCESS = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:ld|st|red|atom)\S*\.(?:global|shared)")
_PTX_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"')
_ACCESSES = ("LDG", "STG", "RED", "REDG", "ATOM", "ATOMG", "LDS", "STS", "ATOMS")


def _copies(kernel: Compiled, code: list[Block]) -> dict[int, float]:
    """By cycle: copies of its body that it has; infinity for one that does the rest of another."""
    files: dict[str, str] = {}
    written: Counter[tuple[str, int]] = Counter()
    at = ("", 0)
    for line in kernel.ptx.splitlines():
        if found := _PTX_FILE.match(line):
            files[found[1]] = found[2].rpartition("/")[2]
    for line in kernel.ptx.splitlines():
        if found := _PTX_LINE.match(line):
            at = (found[1], int(found[2]))
        elif _PTX_ACCESS.match(line):
            written[files.get(at[0], at[0]), at[1]] += 1
    made: defaultdict[Chain, Counter[int]] = defaultdict(Counter)
    for block in code:
        for one in block.instructions:
            if one.name in _ACCESSES and one.chain:
                made[one.chain][block.cycle] += 1
    # A line of a function that is inlined in several places is several chains.
    chains = Counter(_last(chain) for chain in made)
    ratios: defaultdict[int, list[float]] = defaultdict(list)
    rests: set[int] = set()
    for chain, by_cycle in made.items():
        line = _last(chain)
        cycles = [cycle for cycle, _ in by_cycle.most_common() if cycle >= 0]
        if not cycles or not written[line]:
            continue
        accesses = by_cycle[cycles[0]]
        ratios[cycles[0]] += [accesses * chains[line] / written[line]] * accesses
        # What is left over of the turns, once the largest cycle has made its own.
        rests.update(cycles[1:])
    # What most accesses say: of some the assembler says that they are of another place.
    copies = {cycle: max(1.0, statistics.median_low(x)) for cycle, x in ratios.items()}
    return copies | dict.fromkeys(rests - copies.keys(), math.inf)


def _last(chain: Chain) -> tuple[str, int]:
    file, line = chain[-1]
    return name_of(file), line
