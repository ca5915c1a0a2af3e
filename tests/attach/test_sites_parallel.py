"""Sites whose model is divided by tensor parallelism, and sharded by FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.parallel_net import Block, loss_of, parallel
from support.site_net import DENSE, FOUR_BITS, adam, policy


def trained(model: Any, site: int, sites: Any, rule: Any) -> Any:
    optimizer = adam(model)
    handle = tagc.sites(model, optimizer, policy(rule, every=2), sites=sites)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, site, step).backward()
        optimizer.step()
    handle.exchange()
    return handle


@on_ranks(4)
@pytest.mark.parametrize("rule", [DENSE, FOUR_BITS], ids=["dense", "4 bits"])
def test_tensor_parallelism_inside_a_site(rank: int, world_size: int, rule: Any) -> None:
    """A site of two ranks learns what one on a single rank learns."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("site", "dp", "tp"))
    model = parallel(1, 2, mesh=mesh)
    handle = trained(model, rank // 2, mesh["site"], rule)
    anchors: list[Any] = [None, None]
    mine = [anchor.values for anchor in handle.exchange_state.anchors]
    dist.all_gather_object(anchors, mine, group=mesh["site"].get_group())
    equal(anchors[0], anchors[1])
    torch.manual_seed(1)
    alone = Block()
    trained(alone, rank // 2, mesh["site"], rule)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        expected = alone.get_parameter(name)
        # Blocks of the codec end elsewhere. The optimizer moves an element by 0.01 in a step.
        bound = 1e-5 if rule is DENSE else 0.02
        torch.testing.assert_close(param.full_tensor(), expected, rtol=0, atol=bound)
