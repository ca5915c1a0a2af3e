"""What lives across reductions stays where it is in memory.

FSDP reduces on a stream of its own. A tensor that is replaced is freed while that stream may still
work with it, and its block may be another stream's by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tagc
from parity.model import loss_of as token_loss
from support import small_net
from support.block_net import net, sharded, wrap
from support.distributed import on_ranks
from support.gathering import gathered_in
from support.marks import slow
from support.small_net import loss_of
from support.states import POLICIES, QUANTIZED, shipped, wrapped
from tagc.codecs.workspace import Workspace
from tagc.collect.replay import Replay
from tagc.policy import data_parallel_policies

SHIPPED = data_parallel_policies()
# Of every kind of state one that has it.
QUICK = ("matrix lead", "sketch shared", "thrifty")


def tensors_of(thing: Any, seen: set[int], at: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor that an object of the library refers to, and by which attributes. Scratch
    buffers are none of its state, and replays hold views of it."""
    if isinstance(thing, Tensor):
        yield at, thing
        return
    if id(thing) in seen or isinstance(thing, Workspace | Replay):
        return
    seen.add(id(thing))
    inside: list[tuple[Any, Any]] = []
    if isinstance(thing, Mapping):
        inside = list(thing.items())
    elif isinstance(thing, list | tuple | set):
        inside = list(enumerate(thing))
    elif type(thing).__module__.startswith("tagc."):
        inside = list(vars(thing).items())
    for name, value in inside:
        yield from tensors_of(value, seen, f"{at}.{name}")


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model's reducers and gatherers. Who keeps them finds others elsewhere."""
    compressor, seen = tagc.compressor(model), set[int]()
    owners = [*compressor.reducers, *compressor.replica_reducers, *compressor.gatherers]
    return dict(tensors_of(owners, seen))


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    same = {n for n, t in after.items() if n in before and before[n].data_ptr() == t.data_ptr()}
    return sorted((before.keys() | after.keys()) - same)


def check(model: nn.Module, rank: int, loss: Callable[..., Tensor]) -> None:
    compressor = tagc.compressor(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compressor.keep_rates(optimizer, second_moment=True)

    def train(steps: range) -> None:
        for step in steps:
            loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(range(2))
    before = state_of(model)
    train(range(2, 4))
    assert moved(before, state_of(model)) == []
    compressor.scale_residuals(2.0)
    copy = compressor.copy_residuals()
    train(range(4, 5))
    compressor.restore_residuals(copy, where=torch.ones(()))
    compressor.restore_residuals(copy)
    assert moved(before, state_of(model)) == []
    compressor.load_state_dict(compressor.state_dict())
    # A load begins a new gauge.
    assert not [name for name in moved(before, state_of(model)) if ".gauge." not in name]


@on_ranks(2)
@pytest.mark.parametrize("policy", [p if p in QUICK else slow(p) for p in (*SHIPPED, *POLICIES)])
def test_state_stays_where_it_is(rank: int, world_size: int, policy: str) -> None:
    if policy in SHIPPED:
        model = sharded(net(), **gathered_in(policy))
        check(wrap(model, shipped(policy)), rank, token_loss)
    else:
        check(wrapped(POLICIES[policy]), rank, loss_of)


@pytest.mark.slow
@on_ranks(4)
def test_on_hosts(rank: int, world_size: int) -> None:
    check(wrapped(POLICIES["inside"], hosts=2), rank, loss_of)


@on_ranks(4)
def test_across_replicas(rank: int, world_size: int) -> None:
    feedback = {"kind": "residual", "lead": 0.5}
    rule = {"when": {"name": "*.weight"}, "codec": QUANTIZED, "feedback": feedback}
    model, _ = small_net.wrapped({"gradients": [rule], "replicas": [rule]})
    check(model, rank, loss_of)
