"""Who changes parameters: optimizers of any kind, or others, who must say so (codec ``delta``)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import tagc
from support.changes import MATRICES, Descent, delta, hosts_of, wrapped
from support.distributed import on_ranks
from support.exact import EXACT
from support.gathering import gathering, recorded
from support.small_net import local_weights, loss_of, net, sharded, train
from support.units import gathered
from tagc.collect.copy_gatherer import _warn_of_others


@on_ranks(2)
def test_an_optimizer_that_nobody_sees(rank: int, world_size: int) -> None:
    """Then a reduction stands for its step."""
    seen, unseen = wrapped(delta()), wrapped(delta())
    optimizer, unseen_by_all = torch.optim.SGD(seen.parameters(), lr=0.05), Descent(unseen)
    for step in range(3):
        for m in (seen, unseen):
            with torch.no_grad():
                loss_of(m, rank, 100)
                m.reshard()
            loss_of(m, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        unseen_by_all.step()
        torch.testing.assert_close(local_weights(seen), local_weights(unseen), **EXACT)
    sent = [tagc.compressor(m).parameter_wire_bytes for m in (seen, unseen)]
    assert sent[0] == sent[1]


@on_ranks(2)
def test_an_evaluation_between_backward_and_step(rank: int, world_size: int) -> None:
    model = wrapped(delta(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        loss_of(model, rank, step).backward()
        with torch.no_grad():
            loss_of(model, rank, 100)
            model.reshard()
        optimizer.step()
        optimizer.zero_grad()
    assert tagc.compressor(model).metrics().parameter_error < 1e-3


@on_ranks(2)
def test_several_optimizers_and_one_from_before(rank: int, world_size: int) -> None:
    """Each steps when it likes; some parameters have none."""
    model = sharded()
    parameters = list(model.parameters())
    first = torch.optim.SGD(parameters[:3], lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tagc.wrap(model, gathering(delta(8), MATRICES), hosts=None)
    second = torch.optim.AdamW(parameters[3:-1], lr=0.01)
    compressor = tagc.compressor(model)
    for step in range(6):
        loss_of(model, rank, step).backward()
        (first if step % 2 else second).step()
        model.zero_grad()
    assert compressor.metrics().parameter_error < 1e-3
    before = compressor.parameter_wire_bytes
    loss_of(model, rank, 7).backward()  # what the last step changed
    sent = compressor.parameter_wire_bytes - before
    for micro in range(2):
        loss_of(model, rank, micro).backward()
    assert compressor.parameter_wire_bytes == before + sent
    compressor.remove()
    first.step()


@on_ranks(2)
def test_frozen_parameters_go_once(rank: int, world_size: int) -> None:
    model = net()
    for p in model.second.parameters():
        p.requires_grad_(False)
    for module in (model.first[2], model.first, model.second, model):
        fully_shard(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tagc.wrap(model, gathering(delta(), MATRICES), hosts=None)
    gatherers = tagc.compressor(model).gatherers
    (frozen,) = (g for g in gatherers if g.plan.info.name == "second")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(3):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert frozen.wire_bytes == 4 * frozen.plan.columns


@on_ranks(2, 4)
def test_parameters_changed_behind_its_back(rank: int, world_size: int) -> None:
    model = wrapped(delta(), hosts_of(world_size))
    train(model, rank, 2)
    with torch.no_grad():
        loss_of(model, rank, 5)  # what the optimizer changed is known
        model.reshard()
        for p in model.parameters():
            p.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"changed, but not by an optimizer.*refresh\(\)"):
        loss_of(model, rank, 5)


@on_ranks(2, 4)
def test_refreshed_parameters_are_exact(rank: int, world_size: int) -> None:
    """An average swapped in for an evaluation, and out again."""
    calls: list[Any] = []
    with recorded(calls):
        model = wrapped(delta(2), hosts_of(world_size))
        train(model, rank, 3)
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        for factor in (0.5, 2.0):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(factor)
                tagc.compressor(model).refresh()
                calls.clear()
                loss_of(model, rank, 7)
                model.reshard()
            assert calls
            for _, _, inp, out in calls:
                assert torch.equal(out.view(world_size, -1), gathered(inp))
        for name, p in model.named_parameters():
            assert torch.equal(p.to_local(), kept[name].to_local())
        train(model, rank, 1)


@on_ranks(2)
def test_weights_swapped_in_after_a_step_are_said(rank: int, world_size: int) -> None:
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


@on_ranks(2, 4)
def test_a_step_between_a_forward_and_its_backward(rank: int, world_size: int) -> None:
    """FSDP would gather the new parameters; nothing is sent here, so it is an error, in words."""
    model = wrapped(delta(), hosts_of(world_size))
    train(model, rank, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = [loss_of(model, rank, i) for i in range(2)]
    losses[1].backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed between a forward and its backward"):
        losses[0].backward()


# Loads of a part


@on_ranks(2)
def test_new_tensors_for_some_of_the_parameters(rank: int, world_size: int) -> None:
    """``assign=True`` gives FSDP others, and a new optimizer has them; for the rest it has those
    that were known."""
    model = wrapped(delta(8))
    train(model, rank, 2)
    loaded = {k: v.clone() for k, v in model.state_dict().items() if k.startswith("second")}
    model.load_state_dict(loaded, strict=False, assign=True)
    compressor = tagc.compressor(model)
    compressor.refresh()
    train(model, rank, 3)
    loss_of(model, rank, 0)
    assert compressor.metrics().parameter_error < 1e-3
