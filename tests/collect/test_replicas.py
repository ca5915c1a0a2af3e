"""Copies of a sharded model: sharded over one mesh dimension, replicated over another."""

from __future__ import annotations

import os
import warnings
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

CODECS: dict[str, dict[str, Any]] = {
    "bfloat16": {"kind": "dense", "wire": "bfloat16"},
    "quantized": {"kind": "quantized", "bits": 8, "block": 32},
    "sketch": {"kind": "sketch", "density": 0.4},
}
DENSE = [{"when": {}, "codec": {"kind": "dense"}}]


@on_ranks(4)
def test_without_a_rule_replicas_are_averaged_as_they_are(rank: int, world_size: int) -> None:
    model, _ = wrapped({"gradients": DENSE})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    native: Any = net()
    for module in (native.first, native.second, native):
        fully_shard(module, mesh=mesh)  # FSDP's own HSDP
    torch.testing.assert_close(train(model, rank, 3), train(native, rank, 3), **EXACT)
    metrics = tagc.compressor(model).metrics()
    assert metrics.replica_wire_bytes == metrics.replica_dense_bytes > 0


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
def test_both_directions_at_once(rank: int, world_size: int) -> None:
    rule = {"when": {"name": "*.weight"}, "codec": CODECS["quantized"]}
    model, mesh = wrapped({"gradients": [rule], "replicas": [rule]})
    train(model, rank, 4)
    for weight in local_weights(model).values():
        one, other = of_replicas(weight, mesh)
        torch.testing.assert_close(one, other, **EXACT)


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
