"""A standing adversary of desyncs: ranks whose random programs differ in a call or two.

Where ranks come to different collectives, all of them must raise an error that names both, before
anything of either is used; what was computed until then must have the bits of a run without a
desync. Never garbage, never a crash of the process, never a hang. The end of a program is a
collective, too, so that nobody waits for a rank that is done.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import tagc
from support.block_net import grads, wrap
from support.distributed import on_ranks
from support.gathering import INT8, KEPT
from support.marks import slow
from tagc.collect import Transport
from tagc.collect.lockstep import DesyncError, Lockstep

Call = tuple[str, int | None]
"""What a rank does, and which block it leaves out."""
Row = tuple[Call | None, ...]
"""What each rank does; None for nothing."""


def rules(gradients: Any, parameters: Any = None) -> dict[str, Any]:
    when = {"name": "*.weight"}
    about = {"parameters": [{"when": when, "codec": parameters}]} if parameters else {}
    return {"schema": 1, "gradients": [{"when": when, "codec": gradients}], **about}


POLICIES: dict[str, Any] = {
    "8 bits": rules(INT8, INT8),
    "kept": rules(INT8, KEPT),
    "changes": rules(INT8, {"kind": "delta", "bits": 4, "block": 32}),
    "sketch": rules({"kind": "sketch", "density": 0.3}),
    "dense": "dense",
}
CALLS = ["forward", "forward", "backward", "backward", "evaluate", "step", "sync off", "sync on"]
SECONDS = 20.0  # that a group waits for a rank


class Blocks(nn.Module):
    """Three blocks, two of them alike, of which one can be left out."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(16, 16), (16, 16), (16, 24)]
        self.blocks = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x: Tensor, skipped: int | None) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i != skipped:
                x = torch.tanh(block(x))
        return x.square().sum()


class Model:
    """A sharded model in a group of its own."""

    def __init__(self, policy: str, reshard: bool) -> None:
        self.group: Any = dist.new_group(timeout=timedelta(seconds=SECONDS))
        mesh = DeviceMesh.from_group(self.group, "cpu")
        torch.manual_seed(1)
        module = Blocks()
        for block in module.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        self.module: Any = fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        wrap(self.module, POLICIES[policy], hosts=None)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self.losses: list[Tensor] = []
        self.calls = 0
        reducer = tagc.compressor(self.module).reducers[0]
        self.transports: Any = [*reducer._levels.values(), Transport(self.group)]

    def end(self) -> None:
        end = Lockstep("parameters", "the end", torch.device("cpu"))
        end.announce(self.transports, 0)
        end.confirm()

    def call(self, name: str, skipped: int | None) -> None:
        self.calls += 1
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(self.calls))
        if name == "forward":
            self.losses.append(self.module(x, skipped))
        elif name == "backward" and self.losses:
            self.losses.pop().backward()
        elif name == "evaluate":
            with torch.no_grad():
                self.module(x, skipped)
        elif name == "step" and not self.losses:  # or a backward would see other parameters
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # an evaluation may have left them as they were
            self.optimizer.step()
            self.optimizer.zero_grad()
        elif name.startswith("sync"):
            self.module.set_requires_gradient_sync(name == "sync on")


def run(model: Model, calls: Sequence[Call]) -> tuple[list[Any], list[str], BaseException | None]:
    """Gradients after every call, the collectives that were begun, and what was raised."""
    seen: list[Any] = []
    trace: list[str] = []
    announce = Lockstep.announce

    def noted(self: Lockstep, to: Any, words: int, step: int | None = None, part: int = 0) -> None:
        if to:
            trace.append(f"{self.what} (step {self._count if step is None else step}, {words} ")
        announce(self, to, words, step, part)

    with patch.object(Lockstep, "announce", noted):
        try:
            for call in calls:
                model.call(*call)
                seen.append(grads(model.module))
            model.end()
        except RuntimeError as error:
            return seen, trace, error
    return seen, trace, None


def outcome(rows: Sequence[Row], rank: int, **how: Any) -> str:
    """What is wrong with a program on this rank; empty if nothing is."""
    mine = [row[rank] for row in rows]
    common = next((i for i, row in enumerate(rows) if len(set(row)) > 1), len(rows))
    # First: groups of hosts are used again, and a desync leaves messages in them.
    wanted, _, failure = run(Model(**how), [call for call in mine[:common] if call is not None])
    model = Model(**how)
    seen, trace, error = run(model, [call for call in mine if call is not None])
    traces: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(traces, (trace, None if error is None else type(error).__name__))
    if failure is not None:
        return f"without a desync: {failure}"
    for i, (got, undisturbed) in enumerate(zip(seen, wanted, strict=False)):
        if got.keys() != undisturbed.keys():
            return f"gradients of {got.keys()} after call {i}"
        if any(not torch.equal(got[name], undisturbed[name]) for name in got):
            return f"other gradients after call {i}"
    return judged(rank, trace, error, traces)


def judged(rank: int, trace: list[str], error: BaseException | None, traces: list[Any]) -> str:
    """What is wrong with how this rank ended, given what all began, and what they raised."""
    others = [t for t, _ in traces]
    if all(t == others[0] for t in others):
        return "" if error is None else f"nobody differs, but: {error}"
    if any(kind not in (None, "DesyncError", "RuntimeError") for _, kind in traces):
        return f"errors of other kinds: {traces}"
    where = min(same(trace, other) for other in others if other != trace)
    if error is None:
        return f"no error, though others differ: {traces}"
    if len(trace) != where + 1:
        return f"{len(trace)} collectives, but after {where} another rank was elsewhere: {error}"
    text, here = str(error), trace[-1]
    if isinstance(error, DesyncError):
        there = [call for t in others for call in t[where : where + 1] if call != here]
        named = here in text and any(t in text for t in there)
        return "" if named else f"does not name {here!r} and any of {there}: {text}"
    return f"waited for a rank that was elsewhere: {text}"


def same(trace: list[str], other: list[str]) -> int:
    """How many collectives two ranks have in common."""
    pairs = zip(trace, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(trace), len(other)))


def program(choose: random.Random, ranks: int) -> list[Row]:
    """A training, in which one rank leaves something out, adds something, or does it otherwise."""
    calls: list[Call] = []
    for _ in range(choose.randint(1, 3)):
        calls += [("forward", None), ("backward", None)]
        calls += [(choose.choice(CALLS), choose.choice([None, None, 0, 1, 2]))]
        calls += [("step", None)]
    rows: list[Row] = [(call,) * ranks for call in calls]
    for _ in range(choose.randint(1, 2)):
        at, who = choose.randrange(len(rows)), choose.randrange(ranks)
        row = list(rows[at])
        how = choose.choice(["leave out", "other block", "add", "other call"])
        if how == "add":
            call = choose.choice(CALLS), choose.choice([None, 0, 1, 2])
            rows.insert(at, tuple(call if r == who else None for r in range(ranks)))
            continue
        old = row[who]
        if how == "leave out" or old is None:
            row[who] = None
        elif how == "other block":
            row[who] = old[0], choose.choice([0, 1, 2])
        else:
            row[who] = choose.choice(CALLS), old[1]
        rows[at] = tuple(row)
    return rows


@on_ranks(2, timeout=230)
@pytest.mark.parametrize(
    ("seed", "programs"), [(0, 5), *(slow(seed, 12) for seed in range(100, 120))]
)
def test_programs_that_differ(rank: int, world_size: int, seed: int, programs: int) -> None:
    choose = random.Random(seed)
    for _ in range(programs):
        rows = program(choose, world_size)
        how = {"policy": choose.choice(list(POLICIES)), "reshard": choose.random() < 0.7}
        wrong = outcome(rows, rank, **how)
        # Not on this rank alone, or the others would go on without it.
        found = torch.tensor([bool(wrong)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        assert not found, f"{how} {rows}: {wrong}"
