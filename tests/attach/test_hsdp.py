"""FSDP2's own hybrid sharding: a mesh with a replicated dimension, over which tagc averages."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tagc
from support.distributed import on_ranks
from support.exact import EXACT
from support.failing import fails
from support.marks import slow
from support.replicated_net import of_replicas, two_by_two, wrapped
from support.small_net import local_grads, local_weights, loss_of, net, train
from support.states import shared_folder
from tagc.attach import averaging, fsdp2

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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # units as small as these may well cost more compressed
            tagc.wrap(model, {"schema": 1, **policy})
    return model, mesh["copies"]


def micro_batches(model: Any, rank: int, steps: int) -> list[torch.Tensor]:
    """Weights after steps of two backwards, of which replicas share the second one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        for micro in range(2):
            model.set_requires_all_reduce(micro == 1)
            loss_of(model, rank, 2 * step + micro).backward()
            if micro == 0:
                assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return list(local_weights(model).values())


@on_ranks(4)
def test_without_a_rule_replicas_are_averaged_as_they_are(rank: int, world_size: int) -> None:
    model, _ = hybrid({"gradients": [DENSE]})
    native, _ = hybrid()
    torch.testing.assert_close(
        micro_batches(model, rank, 2), micro_batches(native, rank, 2), **EXACT
    )
    metrics = tagc.compressor(model).metrics()
    assert metrics.replica_wire_bytes == metrics.replica_dense_bytes > 0
    tagc.compressor(model).remove()
    torch.testing.assert_close(
        micro_batches(model, rank, 1), micro_batches(native, rank, 1), **EXACT
    )


@on_ranks(4)
def test_the_same_as_tagc_averages_over_replicas_that_it_is_given(
    rank: int, world_size: int
) -> None:
    """To the bit: gradients in both directions, and what they cost."""
    policy = {"gradients": [QUANTIZED], "replicas": [QUANTIZED]}
    model, mesh = hybrid(policy)
    other, _ = wrapped(policy)
    torch.testing.assert_close(train(model, rank, 4), train(other, rank, 4), **EXACT)
    mine, theirs = (tagc.compressor(m).metrics() for m in (model, other))
    assert mine == theirs
    assert 0 < mine.replica_wire_bytes < mine.replica_dense_bytes
    for weight in local_weights(model).values():
        one, copy = of_replicas(weight, mesh)
        torch.testing.assert_close(one, copy, **EXACT)


@on_ranks(4)
def test_what_is_refused(rank: int, world_size: int) -> None:
    """Replicas that are said twice; units with other replicas than the rest."""
    model, copies = hybrid()
    kind, said = fails(lambda: tagc.wrap(model, "loco-4bit", replicas=copies))
    assert (kind, "leave replicas out" in said) == ("ValueError", True)
    mixed = net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    fully_shard(mixed.first, mesh=mesh)
    fully_shard(mixed, mesh=mesh["shards"])
    kind, said = fails(lambda: tagc.wrap(mixed, "loco-4bit"))
    assert (kind, "replicated over different ranks" in said) == ("ValueError", True)


def test_a_torch_whose_all_reduce_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the two lines to change, with the names of the user's own mesh."""
    assert averaging.all_reduces_by_class()
    monkeypatch.setattr(averaging.dist, "all_reduce", lambda tensor, group: None)
    assert not averaging.all_reduces_by_class.__wrapped__()
    info = SimpleNamespace(
        mesh=SimpleNamespace(mesh_dim_names=("dp_replicate", "dp_shard"), shape=(2, 4), ndim=2),
        replicate_mesh_dim=0,
        shard_mesh_dim=1,
    )
    said = fsdp2._in_one_dimension("blocks.0", info)
    assert (
        "'blocks.0' is sharded and replicated over a mesh of (dp_replicate=2, dp_shard=4)" in said
    )
    assert said.splitlines()[1:] == [
        '    fully_shard(module, mesh=mesh["dp_shard"])',
        '    tagc.wrap(model, ..., replicas=mesh["dp_replicate"])',
    ]


CODECS: dict[str, dict[str, Any]] = {
    "bfloat16": {"kind": "dense", "wire": "bfloat16"},
    "quantized": {"kind": "quantized", "bits": 8, "block": 32},
    "sketch": {"kind": "sketch", "density": 0.4},
}
DENSE = [{"when": {}, "codec": {"kind": "dense"}}]


@pytest.mark.some(1)
@on_ranks(4)
@pytest.mark.parametrize("codec", [c if c in ("quantized", "sketch") else slow(c) for c in CODECS])
def test_replicas_stay_equal_and_close_to_dense(rank: int, world_size: int, codec: str) -> None:
    rule = {"when": {"name": "*.weight"}, "codec": CODECS[codec]}
    model, mesh = wrapped({"gradients": DENSE, "replicas": [rule]})
    dense, _ = wrapped({"gradients": DENSE})
    train(model, rank, 6)
    train(dense, rank, 6)
    for name, weight in local_weights(model).items():
        one, other = of_replicas(weight, mesh)
        torch.testing.assert_close(one, other, **EXACT)
        exact = local_weights(dense)[name]
        if CODECS[codec]["kind"] in ("dense", "quantized"):
            torch.testing.assert_close(weight, exact, rtol=0.02, atol=0.002)
    assert any(not torch.equal(w, local_weights(dense)[n]) for n, w in local_weights(model).items())
    metrics = tagc.compressor(model).metrics()
    rows = [r for r in tagc.compressor(model).plan().rows if r.direction == "replicas"]
    # Thresholds are agreed once.
    once = 2 * 4 * 3 if CODECS[codec]["kind"] == "sketch" else 0
    planned = 6 * sum(row.wire_bytes for row in rows)
    assert planned <= metrics.replica_wire_bytes <= planned + once
    assert metrics.unresolved == 0


@on_ranks(4)
def test_rules_for_replicas_need_replicas(rank: int, world_size: int) -> None:
    model, _ = two_by_two()
    rule = {"when": {"name": "*.weight"}, "codec": CODECS["quantized"]}
    with pytest.raises(tagc.PolicyError, match=r'replicas=mesh\["replicate"\]'):
        tagc.wrap(model, {"schema": 1, "gradients": DENSE, "replicas": [rule]})


@on_ranks(4)
@pytest.mark.parametrize("off", [False, True], ids=["", "switched off"])
def test_what_waits_in_a_replica_is_in_no_state(rank: int, world_size: int, off: bool) -> None:
    """As what waits on a host: it cannot be saved, and a load or the user drops it."""
    rule = {
        "when": {"name": "*weight"},
        "codec": {"kind": "quantized", "bits": 8, "block": 32},
        "feedback": {"kind": "none"},
    }
    with mock.patch.dict(os.environ, {"TAGC_DISABLE": str(int(off))}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, _ = wrapped({"gradients": [rule], "replicas": [rule]})
    compressor = tagc.compressor(model)
    state = compressor.state_dict()
    largest = []
    with shared_folder() as folder:
        compressor.save(folder)
        for drop in (
            compressor.drop_waiting,
            lambda: compressor.load_state_dict(state),
            lambda: compressor.load(folder),
        ):
            model.set_requires_all_reduce(False)
            (1000 * loss_of(model, rank, 0)).backward()
            kind, said = fails(compressor.state_dict)
            assert kind == "RuntimeError"
            assert "micro-batches that wait" in said
            drop()
            model.zero_grad()
            model.set_requires_all_reduce(True)
            loss_of(model, rank, 0).backward()
            largest.append(max(float(g.abs().sum()) for g in local_grads(model).values()))
            model.zero_grad()
            compressor.load_state_dict(state)
    native, _ = two_by_two()
    loss_of(native, rank, 0).backward()
    expected = torch.tensor(max(float(g.abs().sum()) for g in local_grads(native).values()))
    dist.all_reduce(expected, dist.ReduceOp.MAX)
    assert max(largest) < 2 * float(expected)
