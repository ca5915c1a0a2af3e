"""Sites: what is refused, on all ranks, before anything is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tagc
from support.distributed import fails, on_ranks
from support.exact import equal
from support.marks import slow
from support.site_net import FOUR_BITS, adam, inside, policy, train
from support.small_net import local, local_weights, net, sharded
from tagc.policy import Policy, PolicyError


def wide() -> nn.Module:
    """Another model."""
    torch.manual_seed(1)
    return nn.Linear(40, 40)


def start(model: Any = None, optimizer: Any = None, rules: Any = None, sites: Any = None) -> Any:
    """``tagc.sites`` of a model, by default a small one on one device."""
    model = net() if model is None else model
    optimizer = adam(model) if optimizer is None else optimizer
    return tagc.sites(model, optimizer, policy() if rules is None else rules, sites=sites)


def alone(rank: int) -> Any:
    """A group of this rank."""
    return [dist.new_group([r]) for r in range(dist.get_world_size())][rank]


def twice(rank: int) -> Any:
    model = net()
    start(model)
    return start(model)


class Stepping(torch.optim.SGD):
    """An optimizer that steps others."""

    others: list[torch.optim.Optimizer]

    def step(self, closure: Any = None) -> None:
        for optimizer in self.others:
            optimizer.step()


def with_another(rank: int) -> Any:
    """Not one that steps the given one, is stepped by it, or moves nothing."""
    for given_inside in (True, False):
        model = net()
        outer, inner, still = Stepping(model.parameters()), adam(model), adam(model)
        still.param_groups[0]["lr"] = 0
        outer.others = [inner]
        handle = start(model, inner if given_inside else outer)
        torch.optim.SGD(model.parameters()).step()  # there are no gradients yet
        train(model, outer, rank, range(1))
        still.step()
        assert handle.metrics().steps == 1
    train(model, torch.optim.NAdam(model.parameters()), rank, range(1))


def fsdp1(rank: int) -> Any:
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    return start(model, sites=dist.group.WORLD)


def switched_off(rank: int) -> Any:
    with patch.dict("os.environ", TAGC_DISABLE="1"):
        return start()


NO_RULE = policy(FOUR_BITS | {"when": {"name": "no such parameter"}})
OVER_SITES = "over ranks that sites=... says are in different sites"
REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "an optimizer of something else on one rank": (
        lambda rank: start(optimizer=adam(wide()) if rank else None),
        "the optimizer does not hold first.0.weight, first.0.bias and ",
    ),
    "no optimizer": (lambda rank: start(optimizer=[]), "needs the torch.optim.Optimizer of the"),
    "another one in training": (
        with_another,
        "NAdam.step() changed parameters that sites exchange, but tagc.sites was not given this",
    ),
    "twice": (twice, "this model already has sites; call remove() on their handle first"),
    "other shapes": (
        lambda rank: start(wide() if rank else None),
        "tagc model differs between ranks: rank 0 has one device: ",
    ),
    "other policies": (
        lambda rank: start(rules=policy(every=2 + rank)),
        "tagc policy differs between ranks: rank 0 has <dict> (",
    ),
    "without section": (
        lambda rank: start(rules="loco-4bit"),
        "policy 'loco-4bit' has no section sites: add sites: {every: 32}",
    ),
    "a single site": (
        lambda rank: start(sites=alone(rank)),
        "sites=... has one rank: a single site has nothing to exchange",
    ),
    "sharded over sites": (lambda rank: start(sharded(), sites=dist.group.WORLD), OVER_SITES),
    "DDP over sites": (lambda rank: start(DistributedDataParallel(net())), OVER_SITES),
    "FSDP1": (fsdp1, "the model is held by FSDP1, which sites do not support"),
    "too many fragments": (
        lambda rank: start(rules=policy(every=90, fragments=80)),
        "the policy has 80 fragments, but the model has ",
    ),
    "switched off": (
        switched_off,
        "TAGC_DISABLE=1, but sites do not train without their exchange",
    ),
    "nothing compressed": (lambda rank: start(rules=NO_RULE), "compresses nothing in this model"),
    "nothing trained": (
        lambda rank: start(net().requires_grad_(False), adam(wide())),
        "the model has no trainable parameters",
    ),
    "wrapped with its policy": (
        lambda rank: tagc.wrap(sharded(), policy()),
        "is for sites: call tagc.sites(model, optimizer, policy)",
    ),
}


@on_ranks(2)
def test_refused(rank: int, world_size: int) -> None:
    for case, (call, expected) in REFUSED.items():
        kind, text = fails(lambda call=call: call(rank))
        assert kind in ("ValueError", "PolicyError", "RuntimeError"), (case, text)
        assert expected in text, (case, text)


@on_ranks(4)
def test_replicas_inside(rank: int, world_size: int) -> None:
    """Of a sharded model: by tagc, which averages them in every step, and by FSDP itself."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))
    model = sharded(mesh=mesh["shard"])
    rules = {"schema": 1, "gradients": [FOUR_BITS], "replicas": [FOUR_BITS]}
    tagc.wrap(model, rules, replicas=mesh["site"])
    _, text = fails(lambda: tagc.sites(model, adam(model), policy(), sites=mesh["site"]))
    assert "averages this model's gradients over replicas in every step" in text
    both = net()
    fully_shard(both, mesh=mesh)
    _, text = fails(lambda: tagc.sites(both, adam(both), policy(), sites=mesh["site"]))
    assert "sharded and replicated inside a site (HSDP)" in text


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "kind", "delay"), [(4, "FSDP2", 0), (2, "one device", 1), slow(4, "DDP", 1)]
)
def test_a_parameter_that_is_not_finite(rank: int, world_size: int, kind: str, delay: int) -> None:
    """In one rank's shard of one site: an error on all ranks of all sites, and anchors stay. After
    a load all go on."""
    model, sites, site = inside(kind, rank, world_size)
    optimizer = adam(model)
    handle = tagc.sites(model, optimizer, policy(FOUR_BITS, every=2, delay=delay), sites=sites)
    saved = deepcopy([model.state_dict(), handle.state_dict()])
    train(model, optimizer, site, range(1))
    anchors = handle.exchange_state.anchors
    before = {anchor.label: anchor.values.clone() for anchor in anchors}
    optimizer.register_step_pre_hook(lambda *_: spoil(model, rank == world_size // 2))
    kind, text = fails(lambda: train(model, optimizer, site, range(1, 2 + delay)))
    assert kind == "FloatingPointError", text
    assert "parameter 'second.0.bias' in site 1 " in text
    equal({anchor.label: anchor.values for anchor in anchors}, before)
    optimizer._optimizer_step_pre_hooks.popitem()
    optimizer.zero_grad()
    optimizer.state.clear()
    model.load_state_dict(saved[0])
    handle.load_state_dict(saved[1])
    train(model, optimizer, site, range(3))
    assert all(bool(t.isfinite().all()) for t in local_weights(model).values())
    assert handle.state_dict()


def spoil(model: nn.Module, here: bool) -> None:
    for name, param in model.named_parameters() if here else ():
        if name.endswith("second.0.bias"):
            with torch.no_grad():
                local(param)[3] = torch.inf


def thaw(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.head.requires_grad_(True)


def add(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.norm = torch.nn.LayerNorm(11)
    optimizer.add_param_group({"params": list(model.norm.parameters())})


def assign(model: Any, optimizer: torch.optim.Optimizer) -> None:
    new = {name: param.clone() for name, param in model.state_dict().items()}
    model.load_state_dict(new, assign=True)


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "change"), [("one device", assign), ("FSDP2", assign), ("FSDP2", thaw), ("FSDP2", add)]
)
def test_other_parameters_than_at_first(
    rank: int, world_size: int, kind: str, change: Callable[..., None]
) -> None:
    """On one site: an error on all, of which that site's names the parameters."""
    model = net() if kind == "one device" else sharded(mesh=one_of(rank))
    model.head.requires_grad_(False)
    optimizer = adam(model)
    handle = tagc.sites(model, optimizer, policy(every=2), sites=dist.group.WORLD)
    train(model, optimizer, rank, range(2))
    if rank:
        change(model, optimizer)
    error, text = fails(handle.exchange)
    if kind == "FSDP2" and change is assign:  # FSDP takes it over
        assert not error
    elif rank:
        assert error == "ValueError"
        assert "sites do not exchange " in text
        assert {thaw: "head.weight", add: "norm.weight", assign: "first."}[change] in text
    else:
        assert (error, text[:46]) == (
            "RuntimeError",
            "tagc: a rank of site 1 refuses to exchange: lo",
        )


def one_of(rank: int) -> Any:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("site", "shard"))["shard"]


PARAMETERS = [{"when": {}, "codec": {"kind": "quantized", "bits": 8}}]
AUTO = [{"when": {}, "codec": {"kind": "auto"}}]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (policy(every=8, fragments=2, delay=4), "begins, 4 steps later (every / fragments)"),
        (policy(every=2, fragments=3), "sites.fragments: 3 fragments cannot be due at different"),
        (policy() | {"parameters": PARAMETERS}, "parameters: "),
        (policy() | {"replicas": [FOUR_BITS]}, "replicas: sites exchange changes of parameters"),
        (policy() | {"gradients": AUTO}, "codec 'auto' chooses by the"),
    ],
)
def test_policies(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy.load(rules)
    assert message in str(caught.value)
