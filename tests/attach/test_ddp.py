"""DDP: what its buckets, its options and its other calls must not change.

Sums of gradients and residuals over DDP's options are in the parity matrix (`tests/parity`), states
in `tests/checkpoint/test_layouts.py`.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import tagc
from support.block_net import wrap
from support.distributed import fails, on_ranks
from support.exact import equal
from support.small_net import local, loss_of, net
from support.states import POLICIES, residual_sums
from support.units import gathered
from tagc.attach import ddp

BITS = POLICIES["quantized residual"]
SKETCH = POLICIES["sketch"]["gradients"][0]
BOTH = {
    "schema": 1,
    "gradients": [SKETCH | {"when": {"name": "second.*.weight"}}, *BITS["gradients"]],
}


def wrapped(policy: Any = BITS, module: nn.Module | None = None, **options: Any) -> Any:
    options = {"bucket_cap_mb": 0.001} | options
    with patch.object(ddp, "UNIT_BYTES", 2000):  # several units
        return wrap(DistributedDataParallel(module or net(), **options), policy)


def train(model: Any, rank: int, steps: range) -> list[dict[str, Tensor]]:
    """The gradients of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in steps:
        loss_of(model, rank, step).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return found


def same_on_all_ranks(gradients: dict[str, Tensor]) -> None:
    flat = torch.cat([grad.flatten() for grad in gradients.values()])
    for other in gathered(flat):
        assert torch.equal(flat, other)


@on_ranks(3)
def test_buckets_change_no_bit(rank: int, world_size: int) -> None:
    """Their sizes, their new order after the first step, and whose memory they are."""
    first = train(wrapped(BOTH), rank, range(3))
    same_on_all_ranks(first[-1])
    options: dict[str, Any]
    for options in ({"bucket_cap_mb": 25, "gradient_as_bucket_view": True}, {"static_graph": True}):
        other = train(wrapped(BOTH, **options), rank, range(3))
        for mine, theirs in zip(first, other, strict=True):
            equal(mine, theirs)


@on_ranks(2)
def test_nothing_compressed_is_ddps_own(rank: int, world_size: int) -> None:
    """Dense, and during a warm-up."""
    expected = train(DistributedDataParallel(net()), rank, range(2))
    for policy in ("dense", POLICIES["warming up"]):
        model = wrapped(policy)
        for mine, theirs in zip(train(model, rank, range(2)), expected, strict=True):
            equal(mine, theirs)
    metrics = tagc.compressor(model).metrics()
    assert metrics.wire_bytes == metrics.dense_bytes > 0


class Odd(nn.Module):
    """Complex numbers, gaps in memory orders, and nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        images = torch.randn(3, 2, 2, 7)
        self.images = nn.Parameter(images.to(memory_format=torch.channels_last))
        self.wave = nn.Parameter(torch.randn(5, 7, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        waves = (self.wave[None] * x[:, None]).abs().square().sum((1, 2))
        return waves + (self.images * x[:3, None, None]).square().sum() + self.empty.sum()


@on_ranks(2)
def test_parameters_of_any_layout(rank: int, world_size: int) -> None:
    """What is owed has the order of the parameter's elements."""
    (rule,) = BITS["gradients"]
    model = wrapped({"schema": 1, "gradients": [rule | {"when": {"name": "images"}}]}, Odd())
    native = DistributedDataParallel(Odd())
    for each in (model, native):
        loss_of(each, rank, 0).backward()
    assert torch.equal(model.module.wave.grad, native.module.wave.grad)
    mine, theirs = (each.module.images.grad for each in (model, native))
    owed = gathered(residual_sums(model)["images"]).sum(0)
    assert owed.any()
    off = 2 * (mine.double() - theirs.double()) + owed
    assert off.abs().max() < 2**-18 * theirs.abs().max()


class Sometimes(nn.Module):
    """Uses its second layer if asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(7, 40), nn.Linear(40, 40)
        self.use = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x).mean(1) if self.use else x.mean(1)


@on_ranks(2)
def test_what_no_rank_uses_is_owed_on(rank: int, world_size: int) -> None:
    """DDP leaves its gradient alone, so that what would be sent would be lost."""
    model = wrapped(module=Sometimes(), find_unused_parameters=True)
    compressor = tagc.compressor(model)

    def step(at: int, use: bool) -> dict[str, Tensor]:
        model.module.use = use
        loss_of(model, rank, at).backward()
        return {k: v.clone() for k, v in compressor.state_dict().items() if "residual" in k}

    before = step(0, use=True)
    model.zero_grad()
    after = step(1, use=False)
    assert model.module.second.weight.grad is None
    assert model.module.first.weight.grad.any()
    changed = {name for name, owed in after.items() if not torch.equal(owed, before[name])}
    assert before.keys() == after.keys()
    assert all("second.weight" in name for name in before.keys() - changed)
    assert any("second.weight" in name and before[name].any() for name in before.keys() - changed)
    assert len(changed) == 1  # of first.weight
    # A rank that does not use it gets what the other does.
    step(2, use=rank == 0)
    grad: Any = model.module.second.weight.grad
    assert grad.any()
    same_on_all_ranks({"second": grad})


@on_ranks(2)
def test_a_rank_with_fewer_batches(rank: int, world_size: int) -> None:
    """In `join`, a rank without data takes part with zeros, and with what it owes."""
    model = wrapped()
    train(model, rank, range(3))
    owed = {name: gathered(t).sum(0) for name, t in residual_sums(model).items()}
    assert all(t.any() for t in owed.values())
    with model.join():
        for step in range(3, 3 + rank):  # none on rank 0
            params = dict(model.module.named_parameters())
            found = torch.autograd.grad(loss_of(model.module, rank, step), list(params.values()))
            mine = dict(zip(params, found, strict=True))
            loss_of(model, rank, step).backward()
    left = {name: gathered(t).sum(0) for name, t in residual_sums(model).items()}
    assert tagc.compressor(model).metrics().steps == 4
    for name, before in owed.items() if rank == 1 else ():
        came_in = before + mine[name]
        handed_out = 2 * model.module.get_parameter(name).grad
        lost = (handed_out + left[name] - came_in).abs()
        assert bool((lost <= 2**-20 * (before.abs() + mine[name].abs() + handed_out.abs())).all())


@on_ranks(2)
def test_a_join_that_divides_by_fewer_ranks(rank: int, world_size: int) -> None:
    """Refused in its first step, on the ranks with data and on those without, also by the hook that
    `remove()` leaves."""
    for policy, removed in ((BITS, False), ("dense", False), (BITS, True)):
        model = wrapped(policy)
        if removed:
            tagc.compressor(model).remove()

        def join(model: Any = model, **options: Any) -> None:
            with model.join(**options):
                for step in range(rank):  # none on rank 0
                    loss_of(model, rank, step).backward()

        join()
        kind, text = fails(lambda join=join: join(divide_by_initial_world_size=False))
        assert kind == "RuntimeError"
        assert "join(divide_by_initial_world_size=False)" in text


class Named(nn.Module):
    """Has a layer whose name is that of DDP's own child."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight, self.module = nn.Parameter(torch.randn(7, 7)), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x @ self.weight)


@on_ranks(2)
def test_every_parameter_has_its_own_name(rank: int, world_size: int) -> None:
    """That it also has in FSDP2; residuals are saved under these."""
    model = wrapped("dense", Named())
    rows = tagc.compressor(model).plan().rows
    assert {row.param for row in rows} == {"weight", "module.weight", "module.bias"}


class Tied(nn.Module):
    """One matrix has two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.own = nn.Parameter(torch.randn(40, 40))
        self.one, self.two = nn.Linear(40, 40), nn.Linear(40, 40, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x @ self.own))


@on_ranks(2)
def test_parameters_that_ddp_ignores(rank: int, world_size: int) -> None:
    """Those, and no others: all names of a parameter, but none of the module's own."""
    policy = {"gradients": [BITS["gradients"][0] | {"when": {"name": ["own", "*.weight"]}}]}
    for ignored, expected in (
        ({"one.weight"}, ["own", "one.bias", "two.weight"]),
        ({"two.weight", "own"}, ["own", "one.weight", "one.bias"]),
        ({"one.weight", "two.weight"}, ["own", "one.bias"]),
    ):
        module: Any = Tied()
        module._ddp_params_and_buffers_to_ignore = ignored
        model = wrapped({"schema": 1, **policy}, module)
        assert [row.param for row in tagc.compressor(model).plan().rows] == expected
        model(torch.randn(3, 40)).sum().backward()  # refuses unknown gradients
        same_on_all_ranks({name: module.get_parameter(name).grad for name in expected})


@on_ranks(2)
def test_a_group_of_one_rank(rank: int, world_size: int) -> None:
    """Beside a larger one: its gradients are the average, and nothing may round them."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "one"))
    alone: Any
    by_ddp: Any
    alone, by_ddp, by_replicate = net(), net(), net()
    by_ddp.first = DistributedDataParallel(by_ddp.first, process_group=mesh["one"].get_group())
    by_ddp.second = DistributedDataParallel(by_ddp.second)
    replicate(by_replicate.first, mesh=mesh["one"])
    replicate(by_replicate, mesh=mesh["all"])
    for model in (alone, wrap(by_ddp, BITS), wrap(by_replicate, BITS)):
        loss_of(model, rank, 0).backward()
        for mine, expected in zip(model.first.parameters(), alone.first.parameters(), strict=True):
            assert torch.equal(local(mine.grad), expected.grad)


@on_ranks(2)
def test_supports_have_no_owner(rank: int, world_size: int) -> None:
    """Policies that share them apply as they are, and every rank chooses its own groups. Rules for
    parameters do nothing."""
    asked = POLICIES["sketch shared"] | {"parameters": POLICIES["parameters"]["parameters"]}
    (rule,) = asked["gradients"]
    own = asked | {"gradients": [rule | {"codec": rule["codec"] | {"support": "own"}}]}
    plans = [tagc.compressor(wrapped(policy)).plan() for policy in (asked, own)]
    assert "no rank owns a shard, so every rank keeps its own groups" in str(plans[0])
    assert "rules for parameters have nothing to do: with DDP each rank has all" in str(plans[0])
    assert plans[0].units == plans[1].units


@on_ranks(2)
def test_parameters_frozen_after_ddp_saw_them(rank: int, world_size: int) -> None:
    for late, message in (
        (True, "before DistributedDataParallel(...) and tagc.wrap"),
        (False, "head.weight"),
    ):
        inner = net()
        inner.head.requires_grad_(late)
        model = DistributedDataParallel(inner)
        inner.head.requires_grad_(not late)
        wrap(model, BITS)
        inner.head.requires_grad_(True)
        kind, text = fails(lambda model=model: loss_of(model, rank, 0).backward())
        assert (kind, message in text) == ("RuntimeError", True), text
