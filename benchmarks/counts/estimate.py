"""Bytes and the least time of a launch, from what it executes and accesses.

The time is the largest of what the bytes take at the memory's bandwidth, the L2 cache's sectors at
its own, and the instructions at the rates of the schedulers and of every pipe, spread over as many
multiprocessors as there are programs for. It leaves out latency (and so occupancy and barriers),
bank conflicts, cache misses of what would fit, uneven programs, and clocks below boost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from . import h100
from .language import Access

_SECTOR = 32
# A copy reaches about 90% of the memory's bandwidth (BabelStream's published runs have 0.87 to
# 0.93). Assumed, without a source: that pipes and schedulers are busy 80% of the clocks at
# best, as warps wait for each other's results.
COPY, BUSY = 0.9, 0.8


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Of a launch.

    Attributes:
        memory: bytes to and from HBM.
        sectors: bytes to and from L2, in sectors of 32.
        atomics: additions and the like, counted by element.
    """

    memory: float = 0.0
    sectors: float = 0.0
    atomics: float = 0.0


def moved(accesses: list[tuple[Access, float]], sizes: dict[str, int], rows: int) -> Moved:
    """Bytes that a launch moves.

    What is accessed side by side costs its own bytes; what lies apart costs sectors. Of a tensor
    that is accessed at random, and fits into the L2 cache, HBM sees every byte once.

    Args:
        sizes: bytes of every argument.
        rows: programs go through so many parts of them one after the other.
    """
    memory = sectors = atomics = 0.0
    lanes: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for access, times in accesses:
        lanes[access.name, access.kind, access.apart] += access.lanes * times
    dense: defaultdict[tuple[str, str], float] = defaultdict(float)
    rising: defaultdict[tuple[str, str], float] = defaultdict(float)
    for access, times in accesses:
        size, made = access.size, access.lanes * times
        atomics += made if access.kind == "atomic" else 0
        # An atomic reads and writes.
        both = 2 if access.kind == "atomic" else 1
        run = access.run * size
        if access.apart == "hashed":
            moves = -(-run // _SECTOR) * _SECTOR * made / access.run * both
            sectors += moves
            if sizes[access.name] / rows <= h100.L2_BYTES:
                dense[access.name, access.kind] += moves
            else:
                memory += moves
        elif access.apart == "listed":
            # Of all sectors, those that have at least one of the runs.
            all_lanes = lanes[access.name, access.kind, access.apart]
            share = min(1.0, all_lanes * size / max(1, sizes[access.name]))
            runs = max(1.0, _SECTOR / run)
            touched = 1 - (1 - share) ** runs if share < 1 else 1.0
            moves = made * size / max(share, 1e-9) * touched * both
            sectors += moves
            memory += moves
        elif access.apart == "rising":
            sectors += made * size * both
            rising[access.name, access.kind] += made * size * both
        else:
            sectors += max(access.unique * times * size, 0.0) * both
            dense[access.name, access.kind] += access.unique * times * size * both
    for (name, _), size in dense.items():
        # What a launch goes over again, it finds in L2 if that holds the whole.
        memory += min(size, sizes[name]) if sizes[name] / rows <= h100.L2_BYTES else size
    # Neighbours read the same words at the same time.
    memory += sum(min(size, sizes[name]) for (name, _), size in rising.items())
    return Moved(memory=memory, sectors=sectors, atomics=atomics)


def copy_seconds(moved: float) -> float:
    """Seconds of a copy that moves so many bytes, there and back together."""
    return moved / h100.MEMORY / COPY


def seconds(
    pipes: Mapping[str, float], instructions: float, what: Moved, programs: int
) -> dict[str, float]:
    """Least seconds by what may bound a launch; the launch takes the largest."""
    clocks = h100.CLOCK * min(h100.MULTIPROCESSORS, max(1, programs)) * BUSY
    found = {
        "memory": copy_seconds(what.memory),
        "L2": what.sectors / h100.L2,
        "issue": instructions / h100.ISSUE / clocks,
    }
    for pipe, made in pipes.items():
        found[pipe] = made / h100.RATES[pipe] / clocks
    # Integer multiplication occupies lanes of the FMA pipe; loads, stores and shuffles go through
    # one unit.
    found["fma"] = (pipes.get("fma", 0) + pipes.get("imul", 0)) / h100.RATES["fma"] / clocks
    units = sum(pipes.get(p, 0) for p in ("shuffle", "shared", "global", "atomic"))
    found["load/store unit"] = units / clocks
    return found
