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

import networkx

from ..compiled import Compiled
from .h100 import pipe_of
from .lines import name_of, statements
from .sass import Block, Chain, blocks_of, disassemble


def executed(kernel: Compiled, executions: Mapping[Chain, float]) -> tuple[dict[str, float], float]:
    """Warp instructions of all programs: by pipe, and all together.

    Args:
        executions: of every statement, by its chain.
    """
    code = blocks_of(disassemble(kernel.cubin))
    pipes: defaultdict[str, float] = defaultdict(float)
    total = 0.0
    for block, times in zip(code, _frequencies(kernel, code, executions), strict=True):
        for one in block.instructions:
            pipes[pipe_of(one.opcode)] += times * kernel.warps
            total += times * kernel.warps
    return pipes, total


def _frequencies(
    kernel: Compiled, code: list[Block], executions: Mapping[Chain, float]
) -> list[float]:
    """How often all programs together execute each block."""
    # The kernel's first statement: once in each program.
    entry = executions[min(c for c in executions if len(c) == 1)]
    copies = _copies(kernel, code)
    calls = {n for n, b in enumerate(code) if any(i.name == "CALL" for i in b.instructions)}
    edges = ((n, m) for n, b in enumerate(code) if n not in calls for m in b.next)
    graph = networkx.DiGraph(edges)
    graph.add_node(0)
    reached = {0, *networkx.descendants(graph, 0)} - calls
    found: list[float] = []
    for number, block in enumerate(code):
        if number not in reached:
            found.append(0.0)
            continue
        votes: list[float] = []
        inner: list[float] = []
        for one in block.instructions:
            chain, loops = statements(one.chain)
            if chain:
                (votes if loops <= block.depth else inner).append(_times(chain, executions))
        times = statistics.median_low(votes or inner or [entry])
        if block.depth == 0:
            # Around a loop: not more often than its body is executed.
            times = min(times, entry)
        found.append(times / copies.get(block.cycle, 1.0))
    return found


def _times(chain: Chain, executions: Mapping[Chain, float]) -> float:
    """Of a statement, or of the call that it is in."""
    outer = (chain[:length] for length in range(len(chain), 0, -1))
    return next((executions[c] for c in outer if c in executions), 0.0)


_PTX_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_PTX_LINE = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_PTX_ACCESS = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:ld|st|red|atom)\S*\.(?:global|shared)")
_ACCESSES = ("LDG", "STG", "RED", "REDG", "ATOM", "ATOMG", "LDS", "STS", "ATOMS")


def _copies(kernel: Compiled, code: list[Block]) -> dict[int, float]:
    """By cycle: copies of its body that it has; infinity for one that does the rest of another."""
    files = {number: name_of(path) for number, path in _PTX_FILE.findall(kernel.ptx)}
    written = Counter[tuple[str, int]]()
    at = ("", 0)
    for line in kernel.ptx.splitlines():
        if found := _PTX_LINE.match(line):
            at = (files[found[1]], int(found[2]))
        elif _PTX_ACCESS.match(line):
            written[at] += 1
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
        if cycles and written[line]:
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
