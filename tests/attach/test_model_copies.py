"""A copy of a model that tagc compresses is a plain model."""

from __future__ import annotations

import io
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.site_net import FOUR_BITS, adam, policy, train
from support.small_net import local_weights, loss_of, net


def copies(model: nn.Module) -> list[nn.Module]:
    saved = io.BytesIO()
    torch.save(model, saved)
    assert b"tagc." not in saved.getvalue()  # so it loads where tagc is not installed
    saved.seek(0)
    return [
        deepcopy(model),
        AveragedModel(model).module,
        torch.load(saved, weights_only=False),
        deepcopy(deepcopy(model)),
    ]


def gradients(model: nn.Module, rank: int) -> Any:
    model.zero_grad()
    loss_of(model, rank, 0).backward()
    return {name: param.grad for name, param in model.named_parameters()}


@on_ranks(2)
@pytest.mark.parametrize("removed", [False, True])
def test_of_a_wrapped_ddp(rank: int, world_size: int, removed: bool) -> None:
    model = DistributedDataParallel(net())
    expected = gradients(DistributedDataParallel(net()), rank)
    tagc.wrap(model, {"schema": 1, "gradients": [FOUR_BITS]})
    if removed:
        tagc.compressor(model).remove()
    for copy in copies(model):
        equal(gradients(copy, rank), expected)
        tagc.wrap(copy, {"schema": 1, "gradients": [FOUR_BITS]})
        tagc.compressor(copy).remove()


@on_ranks(2)
def test_of_a_model_in_sites(rank: int, world_size: int) -> None:
    """Nothing of a copy is exchanged, and what is loaded into it does not count."""
    model = net()
    optimizer = adam(model)
    handle = tagc.sites(model, optimizer, policy(every=2))
    train(model, optimizer, rank, range(1))
    weights = local_weights(model)
    for copy in copies(model):
        equal(local_weights(copy), weights)
        copy.load_state_dict(net().state_dict())
        train(copy, adam(copy), rank, range(3))
        tagc.sites(copy, adam(copy), policy()).remove()
    assert handle.metrics().exchanges == 0
    train(model, optimizer, rank, range(1, 2))
    assert handle.metrics().exchanges == 1
