"""Codec ``delta``: parameters as changes against a copy, sent once for every optimizer step, and
who changes parameters: optimizers of any kind, or others, who must tell."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tagc
from support import oracle
from support.block_net import wrap
from support.distributed import on_ranks
from support.exact import EXACT
from support.gathering import INT8, gathering, recorded
from support.small_net import local_weights, loss_of, net, sharded, train
from support.units import gathered
from tagc.collect import CopyGatherer
from tagc.collect.copy_gatherer import _warn_of_others
from tagc.ops.torch_operators import seeds_of
from tagc.plan import bytes_inside

MATRICES = ["*.[02].weight", "head.weight"]


def delta(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"kind": "delta", "bits": bits} | ({"block": 32} if bits > 2 else {}) | more


def wrapped(codec: dict[str, Any], hosts: Any = None, model: Any = None, **options: Any) -> Any:
    model = sharded(**options) if model is None else model
    return wrap(model, gathering(codec, MATRICES), hosts=hosts)


def planned(compressor: Any) -> float:
    """Bytes of parameters that a rank sends in a step."""
    return sum(r.wire_bytes for r in compressor.plan().rows if r.direction == "parameters")


def evaluate(model: Any, rank: int) -> None:
    with torch.no_grad():
        loss_of(model, rank, 100)
    model.reshard()  # FSDP's root keeps its parameters after a forward


# What ranks have


def changed_rows(rows: Tensor, shards: Tensor, bits: int, by_chance: bool) -> Tensor:
    """The copy after a message in blocks of 32: in float64 but for the roundings of the format.
    What is rounded by chance is rounded once, by the owner: chance comes from the change itself."""
    now = rows.clone()
    for row, shard in zip(now, shards, strict=True):
        change = shard.float() - row.float()
        seed = int(seeds_of(change[None])) if by_chance else None
        sent = oracle.quantize_row(change.numpy(), bits, 32, seed)
        # Exact in float64; float32 rounds the sum once, and the copy's dtype once more.
        row.copy_((row.double() + torch.from_numpy(sent)).float())
    return now


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "codec", "dtype"),
    [
        (3, delta(), torch.float32),
        (4, delta(8, rounding="stochastic"), torch.bfloat16),
        (2, INT8 | {"bits": 4}, torch.bfloat16),
        (4, INT8, torch.float32),
    ],
)
def test_every_rank_has_the_copy_that_messages_make(
    rank: int, world_size: int, codec: dict[str, Any], dtype: torch.dtype
) -> None:
    """Whole in the first step, then by changes in the forward, and read as it is in backward; or
    the parameters themselves, in every gather. Four ranks are on two hosts."""
    calls: list[Any] = []
    mixed = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=True)
    hosts = 2 if world_size == 4 else None
    with recorded(calls):
        model = wrapped(codec, hosts, mp_policy=mixed)
        train(model, rank, 3)
    copied = codec["kind"] == "delta"
    expected: dict[int, Tensor] = {}
    exchanges, lags = 0, []
    for unit, in_backward, inp, out in calls:
        shards, rows = gathered(inp), out.view(world_size, -1)
        before = expected.get(id(unit)) if copied else torch.zeros_like(shards)
        if before is None:
            expected[id(unit)] = shards
        elif not (copied and in_backward):
            now = shards.clone()
            for segment in unit.plan.segments:
                if segment.compressed:
                    span = slice(segment.start, segment.stop)
                    by_chance = codec.get("rounding") == "stochastic"
                    of = before[:, span], shards[:, span]
                    now[:, span] = changed_rows(*of, codec["bits"], by_chance)
            lags.append(bool((now != shards).any()))
            expected[id(unit)] = now
            exchanges += 1
        assert torch.equal(rows, expected[id(unit)])
    if copied:
        assert exchanges == 2 * len(expected)
    else:
        # A step is 1/7 or 1/127 of the largest of 32, so the error about 1/20 or 1/400.
        most = 0.1 if codec["bits"] == 4 else 0.006
        assert most / 6 < tagc.compressor(model).metrics().parameter_error < most
    assert any(lags)


@on_ranks(4)
def test_bytes_are_those_of_the_plan(rank: int, world_size: int) -> None:
    """Whole once; then a message a step, and nothing in backward or in further forwards: two
    backwards that both reduce, and evaluations between them, have the bits of one alone."""
    model, plain = wrapped(delta(), hosts=2), wrapped(delta(), hosts=2)
    compressor = tagc.compressor(model)
    whole = sum(4 * unit.columns for unit in compressor.plan().parameters)
    inside = sum(map(bytes_inside, compressor.plan().parameters))
    train(model, rank, 1)
    train(plain, rank, 1)
    assert compressor.parameter_wire_bytes == whole
    for m in (model, plain):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.05)
        for micro in range(2):
            if m is model:
                evaluate(m, rank)
            loss_of(m, rank, micro).backward()
        optimizer.step()
    assert compressor.parameter_wire_bytes - whole == planned(compressor)
    torch.testing.assert_close(local_weights(model), local_weights(plain), **EXACT)
    assert compressor.metrics().parameter_inside_wire_bytes >= 2 * inside > 0
    stored = sum(g.copy.nbytes for g in compressor.gatherers if isinstance(g, CopyGatherer))
    assert sum(row.stored_bytes for row in compressor.plan().rows) == stored > 0


@on_ranks(2)
def test_not_finite_parameters_are_visible(rank: int, world_size: int) -> None:
    model = wrapped(delta())
    train(model, rank, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.no_grad():
        model.head.weight.to_local().fill_(float("nan"))
    optimizer.step()
    assert bool(loss_of(model, rank, 3).isnan())


# Who changes parameters


@on_ranks(2)
def test_steps_that_no_hook_sees(rank: int, world_size: int) -> None:
    """Without an optimizer of torch's a message is due after each reduction."""
    model, sent = wrapped(delta()), []
    for step in range(3):
        loss_of(model, rank, step).backward()
        sent.append(tagc.compressor(model).parameter_wire_bytes)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.05)
    assert [b - a for a, b in pairwise(sent)] == 2 * [planned(tagc.compressor(model))]


@on_ranks(2)
def test_several_optimizers_and_one_from_before(rank: int, world_size: int) -> None:
    """Each steps when it likes; some parameters have none, and frozen ones go once."""
    model = net()
    model.second.requires_grad_(False)
    for module in (model.first[2], model.first, model.second, model):
        fully_shard(module)
    parameters = [p for p in model.parameters() if p.requires_grad]
    first = torch.optim.SGD(parameters[:3], lr=0.05)
    wrapped(delta(8), model=model)
    second = torch.optim.AdamW(parameters[3:-1], lr=0.01)
    compressor = tagc.compressor(model)
    for step in range(3):
        loss_of(model, rank, step).backward()
        evaluate(model, rank)
        (first if step % 2 else second).step()
        model.zero_grad()
    loss_of(model, rank, 3)
    assert compressor.metrics().parameter_error < 1e-3
    (frozen,) = (g for g in compressor.gatherers if g.plan.info.name == "second")
    assert frozen.wire_bytes == 4 * frozen.plan.columns
    compressor.remove()
    first.step()


@on_ranks(2)
def test_parameters_changed_behind_its_back(rank: int, world_size: int) -> None:
    model = wrapped(delta())
    train(model, rank, 2)
    evaluate(model, rank)  # what the optimizer changed is known
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"changed, but not by an optimizer.*refresh\(\)"):
        loss_of(model, rank, 5)


@on_ranks(4)
def test_refreshed_parameters_are_exact(rank: int, world_size: int) -> None:
    """An average swapped in for an evaluation, and out again."""
    calls: list[Any] = []
    with recorded(calls):
        model = wrapped(delta(2), hosts=2)
        train(model, rank, 3)
        for factor in (0.5, 2.0):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(factor)
            tagc.compressor(model).refresh()
            calls.clear()
            evaluate(model, rank)
            assert calls
            for _, _, inp, out in calls:
                assert torch.equal(out.view(world_size, -1), gathered(inp))
        train(model, rank, 1)


@on_ranks(2)
def test_weights_swapped_in_after_a_step_are_a_warning(rank: int, world_size: int) -> None:
    """A message is due, so they go as a difference: coarse, but not in silence."""
    model = wrapped(delta())
    train(model, rank, 2)
    _warn_of_others.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, rank, 2)
        assert not caught
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
            loss_of(model, rank, 5)
    assert len(caught) == 1
    assert "changed after the optimizer's step and before the next forward" in str(caught[0])
    assert "refresh()" in str(caught[0])


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


@on_ranks(2)
def test_a_closure_that_is_called_several_times_in_a_step(rank: int, world_size: int) -> None:
    """LBFGS moves weights between the calls: every one of them sends what has changed."""
    losses = []
    for policy in (None, gathering(delta(8))):
        torch.manual_seed(1)
        # LBFGS lays all parameters in a row, which DTensor does for even shards only.
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        for module in (model[0], model[2], model):
            fully_shard(module)
        if policy is not None:
            wrap(model, policy, hosts=None)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        closure = Closure(model, optimizer, rank)
        for _ in range(2):
            optimizer.step(closure)
            with torch.no_grad():
                model(closure.x)
        assert closure.calls > 4
        losses.append(float(closure()))
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


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
    evaluate(model, rank)
    train(model, rank, 1)
    evaluate(model, rank)
    assert tagc.compressor(model).metrics().parameter_error < 1e-2
