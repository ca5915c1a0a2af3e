"""What `tagc.wrap` refuses of FSDP1 models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    ShardingStrategy,
    fully_shard,
)

import tagc
from support.distributed import on_ranks
from support.exact import EXACT
from support.fsdp1_net import (
    CPU,
    FSDP,
    WEIGHTS,
    quietly,
    sharded,
    train,
)
from support.small_net import EVERYTHING, loss_of, net
from support.units import policy


def refusal(model: nn.Module, chosen: Any = EVERYTHING, **options: Any) -> tuple[str, str]:
    """The type and message of what `tagc.wrap` raises; the model is as it was."""
    before = [m._comm_hook for m in FSDP.fsdp_modules(model)]
    try:
        tagc.wrap(model, chosen, **options)
    except Exception as error:
        assert [m._comm_hook for m in FSDP.fsdp_modules(model)] == before
        assert not hasattr(model, "_tagc_compressor")
        return type(error).__name__, str(error)
    return "", "nothing was raised"


@on_ranks(2)
def test_what_fsdp1_cannot_do(rank: int, world_size: int) -> None:
    model = sharded()
    kind, said = refusal(model, "hybrid")
    assert kind == "PolicyError"
    assert "whose all-gather cannot be replaced; use a policy for gradients only" in said
    kind, said = refusal(model, "dense", replicas=dist.group.WORLD)
    assert kind == "PolicyError"
    assert "averages over replicas for FSDP2 only" in said
    rule = {"when": {"name": "*"}, "codec": {"kind": "quantized", "bits": 8}}
    kind, said = refusal(model, {"schema": 1, "gradients": [rule], "replicas": [rule]})
    assert kind == "PolicyError"
    assert "averages over replicas for FSDP2 only" in said
    kind, said = refusal(model, policy(({"name": "no.such"}, 0.3)))
    assert kind == "PolicyError"
    assert "compresses nothing" in said
    native = sharded()
    torch.testing.assert_close(train(model, rank, 1), train(native, rank, 1), **EXACT)


@on_ranks(4)
def test_replicated(rank: int, world_size: int) -> None:
    with pytest.warns(FutureWarning, match="NO_SHARD"):
        model = FSDP(net(), device_id=CPU, sharding_strategy=ShardingStrategy.NO_SHARD)
    kind, said = refusal(model)
    assert kind == "ValueError"
    assert "replicated, not sharded (NO_SHARD)" in said
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    model = FSDP(net(), device_id=CPU, device_mesh=mesh, sharding_strategy=strategy)
    kind, said = refusal(model)
    assert kind == "ValueError"
    assert "sharded and replicated (HYBRID_SHARD)" in said
    assert 'replicas=mesh["replicate"]' in said


def own_hook(state: Any, grad: Tensor, shard: Tensor) -> None: ...


@on_ranks(2)
def test_hooks_of_others(rank: int, world_size: int) -> None:
    model = sharded()
    model.register_comm_hook(None, own_hook)
    kind, said = refusal(model)
    assert kind == "ValueError"
    assert "has its own communication hook (own_hook" in said

    model = quietly(tagc.wrap, sharded(), EVERYTHING)
    kind, said = refusal(model.second)
    assert kind == "ValueError"
    assert "'second' is" not in said
    assert "already wrapped, by itself or as a part of another model" in said


@on_ranks(2)
def test_parts_of_a_model(rank: int, world_size: int) -> None:
    model = sharded()
    loss_of(model, rank, 0).backward()
    kind, said = refusal(model.second)
    assert kind == "ValueError"
    assert "part of a larger FSDP1 model" in said

    both: Any = nn.Sequential(FSDP(nn.Linear(4, 4), device_id=CPU), nn.Linear(4, 4))
    fully_shard(both[1])
    kind, said = refusal(both)
    assert kind == "ValueError"
    assert "partly by FSDP1" in said


@on_ranks(2)
def test_ranks_that_disagree(rank: int, world_size: int) -> None:
    kind, said = refusal(sharded(), WEIGHTS if rank else EVERYTHING)
    assert kind == "RuntimeError"
    assert "differs between ranks" in said
