"""Sites whose parameters are loaded after ``tagc.sites``: anchors do not pull them back."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.site_net import FOUR_BITS, adam, in_sites, inside, policy, train
from support.small_net import local_weights, net

DELAYED = policy(FOUR_BITS, every=4, delay=1, alpha=0.5)


def others() -> dict[str, Tensor]:
    """The weights of another model, on all ranks alike."""
    torch.manual_seed(2)
    return {name: torch.randn_like(param) for name, param in net().named_parameters()}


def load(model: nn.Module) -> None:
    model.load_state_dict(others())


def load_parts(model: nn.Module, state: dict[str, Any]) -> None:
    for name, child in model.named_children():
        start = f"{name}."
        child.load_state_dict(
            {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
        )


def write(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.data.copy_(others()[name])


def held(model: nn.Module, handle: Any) -> dict[str, Any]:
    """Parameters, and all that an exchange depends on."""
    anchors = handle.exchange_state.anchors
    handle.exchange_state.settle()
    residuals = [residual for a in anchors for residual in a.reducer.residuals.values()]
    return {
        "weights": local_weights(model),
        "anchors": [a.shared for a in anchors],
        "residuals": residuals,
    }


def anchors_of(handle: Any) -> dict[str, Tensor]:
    return {anchor.label: anchor.values.clone() for anchor in handle.exchange_state.anchors}


@on_ranks(2)
def test_before_the_first_step(rank: int, world_size: int) -> None:
    """As if they had been written before ``tagc.sites``, in whatever way; also after torch made the
    optimizer's state in a step of its own."""
    found = []
    for changes in ((write, lambda _: None), (lambda _: None, write)):
        model = net()
        changes[0](model)
        optimizer = adam(model)
        handle = tagc.sites(model, optimizer, DELAYED)
        get_state_dict(model, optimizer)
        changes[1](model)
        state = handle.state_dict()
        train(model, optimizer, rank, range(6))
        found.append({"state": state} | held(model, handle))
    equal(*found)


@on_ranks(4)
def test_in_mid_run(rank: int, world_size: int) -> None:
    """Momentum, residuals and the average in flight are of the old run, and dropped."""
    found = []
    for steps in (0, 4):
        model, sites, site = inside("FSDP2", rank, world_size)
        optimizer = adam(model)
        handle = tagc.sites(model, optimizer, DELAYED, sites=sites)
        before = deepcopy(model.state_dict())
        train(model, optimizer, site, range(steps))
        optimizer.state.clear()
        load_parts(model, before)
        train(model, optimizer, site, range(5))
        found.append(held(model, handle))
    equal(*found)


@on_ranks(2)
@pytest.mark.parametrize("order", ["model first", "handle first"])
def test_with_the_state_of_sites(rank: int, world_size: int, order: str) -> None:
    """What was loaded together belongs together, in any order, and resumes to the bit."""
    model, optimizer, handle = in_sites(DELAYED)
    train(model, optimizer, rank, range(6))
    saved = deepcopy([model.state_dict(), optimizer.state_dict(), handle.state_dict()])
    train(model, optimizer, rank, range(6, 9))
    expected = held(model, handle)
    loads = [lambda: model.load_state_dict(saved[0]), lambda: handle.load_state_dict(saved[2])]
    for one in loads if order == "model first" else reversed(loads):
        one()
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, rank, range(6, 9))
    equal(held(model, handle), expected)


@on_ranks(2)
def test_averaged_weights_swapped_in_and_out(rank: int, world_size: int) -> None:
    """On one site only, to evaluate them: that is no load, also if all sites then clamp."""
    found = []
    for swaps in (False, True):
        model, optimizer, handle = in_sites(DELAYED)
        train(model, optimizer, rank, range(2))
        if swaps and rank == 0:
            own = deepcopy(model.state_dict())
            load(model)
            model.load_state_dict(own)
        with torch.no_grad():
            model.head.bias.clamp_(-0.1, 0.1)
        with pytest.warns(UserWarning, match="wrote to parameters"):
            train(model, optimizer, rank, range(2, 6))
        found.append(held(model, handle))
    equal(*found)


@on_ranks(2)
def test_other_writes(rank: int, world_size: int) -> None:
    """Count as training, with a warning; :meth:`refresh` says that they were a load."""
    model, optimizer, handle = in_sites(policy(every=2))
    train(model, optimizer, rank, range(3))
    with torch.no_grad():
        model.head.bias.clamp_(-1, 1)
    before = anchors_of(handle)
    with pytest.warns(UserWarning, match=r"wrote to parameters .* call refresh\(\) of the handle"):
        handle.state_dict()
    equal(anchors_of(handle), before)
    with torch.no_grad():
        model.head.bias.clamp_(-1, 1)
    train(model, optimizer, rank, range(3, 4))  # warnings are errors
    write(model)
    handle.refresh()
    exact = {anchor.label: anchor.unit.read() for anchor in handle.exchange_state.anchors}
    equal(anchors_of(handle), exact)
    train(model, optimizer, rank, range(4, 6))
