"""Copies of a sharded model: FSDP2's own hybrid sharding, and replicas that tagc is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tagc
from support.block_net import wrap
from support.distributed import on_ranks
from support.exact import EXACT, equal
from support.failing import fails
from support.small_net import (
    local_grads,
    local_weights,
    loss_of,
    net,
    of_replicas,
    train,
    two_by_two,
    wrapped,
)
from tagc.attach import fsdp2, fsdp2_collectives

QUANTIZED = {"when": {"name": "*.weight"}, "codec": {"kind": "quantized", "bits": 4, "block": 32}}
DENSE = {"when": {}, "codec": {"kind": "dense"}}
NAMES = ("copies", "shards")


def hybrid(policy: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """The small model on a mesh of 2 x 2 ranks, wrapped if there is a policy; and its copies."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    model = net()
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    if policy is not None:
        wrap(model, {"schema": 1, **policy})
    return model, mesh["copies"]


def micro_batches(model: Any, rank: int) -> dict[str, torch.Tensor]:
    """Weights after a step of two backwards, of which replicas share the second one."""
    for micro in range(2):
        model.set_requires_all_reduce(micro == 1)
        loss_of(model, rank, micro).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.step()
    optimizer.zero_grad()
    return local_weights(model)


@on_ranks(4)
def test_without_a_rule_replicas_are_averaged_as_they_are(rank: int, world_size: int) -> None:
    model, native = hybrid({"gradients": [DENSE]})[0], hybrid()[0]
    equal(micro_batches(model, rank), micro_batches(native, rank))
    metrics = tagc.compressor(model).metrics()
    assert metrics.replica_wire_bytes == metrics.replica_dense_bytes > 0
    tagc.compressor(model).remove()
    equal(micro_batches(model, rank), micro_batches(native, rank))


@on_ranks(4)
def test_the_same_as_tagc_averages_over_replicas_that_it_is_given(
    rank: int, world_size: int
) -> None:
    """To the bit: gradients in both directions, and what they cost."""
    policy = {"gradients": [QUANTIZED], "replicas": [QUANTIZED]}
    model, mesh = hybrid(policy)
    other, _ = wrapped(policy)
    torch.testing.assert_close(train(model, rank, 2), train(other, rank, 2), **EXACT)
    mine, theirs = (tagc.compressor(m).metrics() for m in (model, other))
    assert mine == theirs
    assert 0 < mine.replica_wire_bytes < mine.replica_dense_bytes
    for weight in local_weights(model).values():
        torch.testing.assert_close(*of_replicas(weight, mesh), **EXACT)


@on_ranks(4)
def test_what_waits_in_a_replica_is_in_no_state(rank: int, world_size: int) -> None:
    """As what waits on a host: it cannot be saved, and a load or the user drops it."""
    codec = {"kind": "quantized", "bits": 8, "block": 32}
    rule = {"when": {"name": "*weight"}, "codec": codec, "feedback": {"kind": "none"}}
    model, _ = wrapped({"gradients": [rule], "replicas": [rule]})
    compressor = tagc.compressor(model)
    state = compressor.state_dict()

    def largest(of: Any) -> float:
        loss_of(of, rank, 0).backward()
        found = max(float(g.abs().sum()) for g in local_grads(of).values())
        of.zero_grad()
        return found

    sums = []
    for drop in (compressor.drop_waiting, lambda: compressor.load_state_dict(state)):
        model.set_requires_all_reduce(False)
        (1000 * loss_of(model, rank, 0)).backward()
        kind, text = fails(compressor.state_dict)
        assert (kind, "micro-batches that wait" in text) == ("RuntimeError", True), text
        drop()
        model.zero_grad()
        model.set_requires_all_reduce(True)
        sums.append(largest(model))
    expected = torch.tensor(largest(two_by_two()[0]))
    dist.all_reduce(expected, dist.ReduceOp.MAX)
    assert max(sums) < 2 * float(expected)


def test_a_torch_whose_all_reduce_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the two lines to change, with the names of the user's own mesh."""
    assert fsdp2_collectives.all_reduces_by_class()
    monkeypatch.setattr(fsdp2_collectives.dist, "all_reduce", lambda tensor, group: None)
    assert not fsdp2_collectives.all_reduces_by_class.__wrapped__()
    info = SimpleNamespace(
        mesh=SimpleNamespace(mesh_dim_names=("dp_replicate", "dp_shard"), shape=(2, 4), ndim=2),
        replicate_mesh_dim=0,
        shard_mesh_dim=1,
    )
    text = fsdp2._in_one_dimension("blocks.0", info)
    assert (
        "'blocks.0' is sharded and replicated over a mesh of (dp_replicate=2, dp_shard=4)" in text
    )
    assert text.splitlines()[1:] == [
        '    fully_shard(module, mesh=mesh["dp_shard"])',
        '    tagc.wrap(model, ..., replicas=mesh["dp_replicate"])',
    ]
