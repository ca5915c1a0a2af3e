"""Peeling by work lists, simulated: how much each program of each launch finds and frees.

What :mod:`triton_kernels.peel` does depends on the table alone, and which program does how much of
it on their order. Here all programs take a step at the same time: each takes up to 32 cells off its
stash, recovers those keys that nobody has, and pushes the cells that have one key left then. At
most ``2**20`` keys are simulated; larger tables have as many keys, cells and programs in the same
proportion, which differs by the tail alone: the last rounds, with few keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

_MOST_KEYS = 1 << 20
_NO_LIMIT = 1 << 30


@dataclass(kw_only=True)
class Peeling:
    """What happened.

    Attributes:
        scale: simulated keys, as a share of all.
        programs: simulated.
        sizes: simulated cells that each launch reads, and those that the last leaves over.
        freed: by launch, program and step: cells that have one key left.
        steps: by launch: the most steps of a program.
        taken: cells taken off a stash.
        recovered: keys.
    """

    scale: float
    programs: int
    sizes: list[int] = field(default_factory=list)
    freed: list[list[list[int]]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    taken: int = 0
    recovered: int = 0


def simulate(
    *, keys: int, cells: int, hashes: int, programs: int, launches: int, limit: int, room: int,
    block: int, seed: int = 1,
) -> Peeling:  # fmt: skip
    """Peel a random table.

    Args:
        cells: in all partitions together.
        launches: of which all but the last one have a limit.
        limit: steps of a program.
        room: of a program's stash.
        block: cells of a step.
    """
    scale = min(1.0, _MOST_KEYS / keys)
    few, partition = max(1, int(keys * scale)), max(1, int(cells * scale / hashes))
    P = max(1, round(programs * scale))
    random = np.random.default_rng(seed)
    cell_of = random.integers(0, partition, (hashes, few)) + np.arange(hashes)[:, None] * partition
    degree = np.bincount(cell_of.ravel(), minlength=hashes * partition)
    total = np.zeros(hashes * partition, np.int64)
    for row in cell_of:
        np.add.at(total, row, np.arange(few))
    done = np.zeros(few, bool)
    found = Peeling(scale=scale, programs=P)
    source = np.flatnonzero(degree == 1)
    for launch in range(launches):
        found.sizes.append(len(source))
        most = _NO_LIMIT if launch == launches - 1 else limit
        freed: list[list[int]] = [[] for _ in range(P)]
        share = max(1, -(-len(source) // P))
        begin = np.minimum(np.arange(P) * share, len(source))
        end = np.minimum(begin + share, len(source))
        stash = np.full((P, room), -1, np.int64)
        count, steps = np.zeros(P, np.int64), np.zeros(P, np.int64)
        handed: list[Any] = []
        while True:
            runs = (begin < end) | ((count > 0) & (steps < most))
            if not runs.any():
                break
            for p in np.flatnonzero(runs & (begin < end) & (count < block)):
                some = source[begin[p] : min(begin[p] + block, end[p])]
                stash[p, count[p] : count[p] + len(some)] = some
                count[p] += len(some)
                begin[p] += block
            # Who has loaded takes its step at once: only the order differs.
            active = np.flatnonzero(runs)
            at = count[active, None] - 1 - np.arange(block)
            item = np.where(at >= 0, stash[active[:, None], np.maximum(at, 0)], -1)
            count[active] = np.maximum(count[active] - block, 0)
            steps[active] += 1
            owner = np.repeat(active, block)[(item >= 0).ravel()]
            item = item[item >= 0]
            found.taken += len(item)
            alone = degree[item] == 1
            item, owner = item[alone], owner[alone]
            key, first = np.unique(total[item], return_index=True)
            fresh = ~done[key]
            key, item, owner = key[fresh], item[first[fresh]], owner[first[fresh]]
            done[key] = True
            found.recovered += len(key)
            other = cell_of[:, key]
            mask = other != item
            owners = np.broadcast_to(owner, other.shape)[mask]
            where = other[mask]
            np.subtract.at(total, where, np.broadcast_to(key, other.shape)[mask])
            cell, first, times = np.unique(where, return_index=True, return_counts=True)
            single = (degree[cell] >= 2) & (degree[cell] - times <= 1)
            degree[cell] -= times
            cell, owners = cell[single], owners[first[single]]
            order = np.argsort(owners, kind="stable")
            cell, owners = cell[order], owners[order]
            more = np.bincount(owners, minlength=P)
            slot = np.arange(len(cell)) - (np.cumsum(more) - more)[owners]
            for p in active:
                freed[p].append(int(more[p]))
            fits = count + more <= room
            stays = fits[owners]
            stash[owners[stays], (count[owners] + slot)[stays]] = cell[stays]
            handed.append(cell[~stays])
            count += np.where(fits, more, 0)
        handed += [stash[p, : count[p]] for p in np.flatnonzero(count)]
        source = np.concatenate([np.empty(0, np.int64), *handed])
        found.freed.append(freed)
        found.steps.append(int(steps.max()))
    found.sizes.append(len(source))
    return found
