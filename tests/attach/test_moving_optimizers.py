"""Optimizers that move weights inside a step, or without one (codec ``delta``)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import tagc
from support.changes import delta, wrapped
from support.distributed import on_ranks
from support.exact import equal
from support.gathering import gathering, recorded
from support.small_net import loss_of, train
from support.units import gathered


def even() -> Any:
    """LBFGS lays all parameters in a row, which DTensor does for even shards only."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    for module in (model[0], model[2], model):
        fully_shard(module)
    return model


class Closure:
    """Of a full batch; all ranks get the same loss, or they would not make the same steps."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
        self.model, self.optimizer, self.calls = model, optimizer, 0
        self.x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))

    def __call__(self) -> Tensor:
        self.calls += 1
        self.optimizer.zero_grad()
        loss = (self.model(self.x) - self.x.roll(1, 1)).square().mean()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / 2


@pytest.mark.some(1)
@on_ranks(2)
@pytest.mark.parametrize("search", ["strong_wolfe", None])
def test_a_closure_that_is_called_several_times_in_a_step(
    rank: int, world_size: int, search: str | None
) -> None:
    """LBFGS moves weights between the calls: every one of them sends what has changed."""
    losses = []
    for policy in (None, gathering(delta(8))):
        model = even()
        if policy is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tagc.wrap(model, policy, hosts=None)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=search)
        closure = Closure(model, optimizer, rank)
        for _ in range(4):
            optimizer.step(closure)
            with torch.no_grad():
                model(closure.x)
        assert closure.calls > 8
        losses.append(float(closure()))
    assert losses[1] < 0.7
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


@on_ranks(2)
def test_a_closure_that_is_called_once_sends_no_more(rank: int, world_size: int) -> None:
    model = wrapped(delta())
    train(model, rank, 2)
    compressor = tagc.compressor(model)
    planned = sum(r.wire_bytes for r in compressor.plan().rows if r.direction == "parameters")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def closure() -> None:
        for micro in range(2):
            loss_of(model, rank, micro).backward()

    for _ in range(2):
        before = compressor.parameter_wire_bytes
        optimizer.step(closure=closure)
        assert compressor.parameter_wire_bytes - before == planned


@pytest.mark.slow
@on_ranks(2, timeout=200)
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_compiled_step(rank: int, world_size: int, with_closure: bool) -> None:
    """The compiler does not trace what tagc does around it."""
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
    found = []
    for compiled in (False, True):
        model = wrapped(delta())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if not with_closure:
            tagc.compressor(model).keep_rates(optimizer, second_moment=True)
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        for step in range(3):
            loss = loss_of(model, rank, step)
            loss.backward()
            optimizer.step(*[loss.detach] * with_closure)
            optimizer.zero_grad()
        found.append(tagc.compressor(model).state_dict())
    equal(*found)


class ScheduleFree(torch.optim.SGD):
    """Evaluates an average of the weights that it trains, which it swaps in and out in place."""

    @torch.no_grad()
    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["trained"] = p.detach().clone()
            p.mul_(0.5)

    @torch.no_grad()
    def train(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p].pop("trained"))


@on_ranks(2)
@pytest.mark.parametrize("refreshes", [True, False])
def test_an_optimizer_that_swaps_weights(rank: int, world_size: int, refreshes: bool) -> None:
    """No hook sees that: with ``refresh()`` evaluations see exact weights, without it the next
    forward raises."""
    calls: list[Any] = []
    with recorded(calls):
        model = wrapped(delta())
    optimizer = ScheduleFree(model.parameters(), lr=0.05)
    for step in range(3):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss_of(model, rank, 100)
        model.reshard()
    for swap in (optimizer.eval, optimizer.train):
        swap()
        calls.clear()
        with torch.no_grad():
            if not refreshes:
                with pytest.raises(RuntimeError, match=r"refresh\(\).*schedule-free"):
                    loss_of(model, rank, 100)
                return
            tagc.compressor(model).refresh()
            loss_of(model, rank, 100)
            model.reshard()
        assert calls
        for _, _, inp, out in calls:
            assert torch.equal(out.view(world_size, -1), gathered(inp))


class Raises(torch.optim.SGD):
    """Its step fails on rank 0, after some of it."""

    rank = 0

    def step(self, closure: Any = None) -> None:
        if self.rank == 0:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(0.5)
            raise ArithmeticError("out of luck")
        super().step(closure)


@on_ranks(2)
def test_a_step_that_raises_on_one_rank(rank: int, world_size: int) -> None:
    """All know that it began: in the next forward all send, and what was changed arrives."""
    model = wrapped(delta(8))
    train(model, rank, 2)
    optimizer = Raises(model.parameters(), lr=0.05)
    optimizer.rank = rank
    loss_of(model, rank, 2).backward()
    if rank == 0:
        with pytest.raises(ArithmeticError):
            optimizer.step()
    else:
        optimizer.step()
    for _ in range(2):
        with torch.no_grad():
            loss_of(model, rank, 100)
            model.reshard()
    train(model, rank, 2)
    with torch.no_grad():
        loss_of(model, rank, 100)
    assert tagc.compressor(model).metrics().parameter_error < 1e-2
