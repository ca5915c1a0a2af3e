"""A standing adversary of groups that compress: random programs of collectives.

Calls of all kinds, sizes and dtypes are in flight together and are waited for in any order, inside
and outside of forwards. Every result must have the bits of arithmetic of its own, when it is waited
for and at the end, whatever became of the inputs. A program that fails is shrunk.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tagc
from support.coded_mesh import added, coded, mesh_of
from support.distributed import on_ranks
from support.marks import slow
from support.shrinking import anywhere, shrunk
from tagc.collect.transport import all_gather, reduce_scatter
from tagc.groups.activations import CODED, SMALL_MESSAGE

KINDS = ("all-reduce", "average", "all-gather", "reduce-scatter", "all-to-all", "swap", "barrier")
SIZES = (1, 100, SMALL_MESSAGE - 1, SMALL_MESSAGE, 3 * SMALL_MESSAGE + 40)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.int64)


@dataclass(frozen=True)
class Call:
    """One collective; the same on all ranks.

    Attributes:
        sizes: elements that each rank has for each rank.
        activation: whether it is part of a forward.
        then: how many calls are left in flight after it.
    """

    kind: str
    seed: int
    sizes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    activation: bool
    then: int

    def inputs(self, rank: int) -> list[Tensor]:
        """What a rank has for each rank; whole numbers where sums must be exact."""
        generator = torch.Generator().manual_seed(self.seed + rank)
        found = []
        for to, n in enumerate(self.sizes[rank]):
            whole = torch.randint(-8, 9, (n,), generator=generator)
            wide = torch.randn(n, generator=generator)
            exact = not self.is_coded(rank, to)
            found.append((whole if exact else wide).to(self.dtype))
        return found

    def is_coded(self, sender: int, receiver: int) -> bool:
        """Whether that part travels as a message."""
        if self.dtype not in CODED or not (self.activation or self.kind == "swap"):
            return False
        return self.sizes[sender][receiver] >= SMALL_MESSAGE


def programs(seed: int, ranks: int, length: int) -> list[Call]:
    """A random program."""
    draw = random.Random(seed)
    found = []
    for i in range(length):
        kind = draw.choice(KINDS)
        dtype = draw.choice(DTYPES)
        if kind == "average" and dtype is torch.int64:
            dtype = torch.float32  # gloo has no averages of integers
        if kind == "all-to-all":
            sizes = tuple(
                tuple(draw.choice((0, *SIZES)) for _ in range(ranks)) for _ in range(ranks)
            )
        else:
            sizes = ((draw.choice(SIZES),) * ranks,) * ranks
        then = draw.randrange(4)
        found.append(Call(kind, 1000 * i + seed, sizes, dtype, draw.random() < 0.7, then))
    return found


def start(
    call: Call, rank: int, group: Any
) -> tuple[Any, list[Tensor], list[Tensor], list[Tensor]]:
    """Start a call: its work, inputs, outputs, and what these must become."""
    W = len(call.sizes)
    everything = [call.inputs(r) for r in range(W)]
    mine = everything[rank]

    def arrives(sender: int, receiver: int) -> Tensor:
        t = everything[sender][receiver]
        return coded(t) if call.is_coded(sender, receiver) else t

    inputs = [t.clone() for t in mine]
    if call.kind in ("all-reduce", "average"):
        out = torch.cat(inputs)
        op = dist.ReduceOp.SUM if call.kind == "all-reduce" else dist.ReduceOp.AVG
        expected = _sum(call, everything, W)
        return dist.all_reduce(out, op, group=group, async_op=True), [], [out], [expected]
    if call.kind == "all-gather":
        out = torch.empty(W, len(inputs[0]), dtype=call.dtype)
        work = all_gather(out.view(-1), inputs[0], group=group, async_op=True)
        expected = torch.stack([arrives(r, 0) for r in range(W)]).to(call.dtype)
        return work, inputs, [out], [expected]
    if call.kind == "reduce-scatter":
        out, whole = torch.empty(len(inputs[0]), dtype=call.dtype), torch.cat(inputs)
        work = reduce_scatter(out, whole, group=group, async_op=True)
        expected = added([arrives(r, rank) for r in range(W)]).to(call.dtype)
        return work, [whole], [out], [expected]
    if call.kind == "all-to-all":
        arriving = [row[rank] for row in call.sizes]
        out, whole = torch.empty(sum(arriving), dtype=call.dtype), torch.cat(inputs)
        leaving = [*call.sizes[rank]]
        work = dist.all_to_all_single(out, whole, arriving, leaving, group=group, async_op=True)
        expected = torch.cat([arrives(r, rank).to(call.dtype) for r in range(W)])
        return work, [whole], [out], [expected]
    if call.kind == "swap":
        after, before = (rank + 1) % W, (rank - 1) % W
        out = torch.empty(call.sizes[before][rank], dtype=call.dtype)
        operations = [
            dist.P2POp(dist.isend, inputs[after], group=group, group_peer=after),
            dist.P2POp(dist.irecv, out, group=group, group_peer=before),
        ]
        works = dist.batch_isend_irecv(operations)
        return works, inputs, [out], [arrives(before, rank).to(call.dtype)]
    return dist.barrier(group=group, async_op=True), [], [], []


def _sum(call: Call, everything: Sequence[list[Tensor]], W: int) -> Tensor:
    rows = [torch.cat(row) for row in everything]
    divisor = W if call.kind == "average" else 1
    if not call.is_coded(0, 0):
        return (added(rows) / divisor if divisor > 1 else added(rows)).to(call.dtype)
    total = added([coded(row) for row in rows]) / divisor
    return (total if W == 2 else coded(total)).to(call.dtype)


def wrong(program: list[Call], rank: int, group: Any) -> str:
    """What a program gets wrong on this rank; empty if nothing."""
    flying: list[tuple[Call, Any, list[Tensor], list[Tensor], list[Tensor]]] = []
    done: list[tuple[Call, list[Tensor], list[Tensor]]] = []
    draw = random.Random(len(program))  # the same order on all ranks

    def land(at: int) -> None:
        call, work, inputs, outputs, expected = flying.pop(at)
        for one in work if isinstance(work, list) else [work]:
            one.wait()
        for t in inputs:
            t.fill_(77)  # nobody needs them any more
        done.append((call, outputs, expected))

    for call in program:
        with tagc.activations() if call.activation else nullcontext():
            flying.append((call, *start(call, rank, group)))
        while len(flying) > call.then:
            land(draw.randrange(len(flying)))
    while flying:
        land(draw.randrange(len(flying)))
    for call, outputs, expected in done:
        for out, wanted in zip(outputs, expected, strict=True):
            if not torch.equal(out, wanted):
                off = (out.double() - wanted.double()).abs().max().item()
                return f"{call}: {off:.3g} off"
    return ""


@on_ranks(2, 3)
@pytest.mark.parametrize("seeds", [range(6), slow(range(6, 150))], ids=str)
def test_random_programs(rank: int, world_size: int, seeds: range) -> None:
    group = mesh_of(world_size).get_group()

    def fails(calls: list[Call]) -> bool:
        return anywhere(wrong(calls, rank, group))

    for seed in seeds:
        program = programs(seed, world_size, 12)
        if fails(program):
            smallest = shrunk(program, fails)
            raise AssertionError(f"{smallest}\n{wrong(smallest, rank, group)}")
