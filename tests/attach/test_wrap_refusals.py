"""What `tagc.wrap` refuses, whatever shares the model: an error on every rank that names the
remedy, before anything is sent; and the model is as it was. More of FSDP1 and of dtypes is in the
parity matrix (`tests/parity`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as with_hooks
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import tagc
from parity.fsdp2_options import in_two_meshes
from parity.option import two_by_two
from support import block_net, small_net
from support.distributed import fails, on_ranks
from support.fsdp1_net import CPU, FSDP
from support.fsdp1_net import sharded as by_fsdp1
from support.gathering import INT8, gathering
from support.small_net import EVERYTHING, loss_of, net, sharded
from support.states import POLICIES, wrapped
from tagc.attach import fsdp2

BITS = POLICIES["quantized residual"]
REPLICAS = BITS | {"replicas": BITS["gradients"]}
NOBODY = {"when": {"name": "nobody"}, "codec": {"kind": "quantized"}}


def hooked() -> Any:
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, allreduce_hook)
    return model


def ddp(model: nn.Module | None = None) -> Any:
    return DistributedDataParallel(model or net())


def stepping_in_backward() -> Any:
    """As `_apply_optimizer_in_backward` leaves it, whose import warns."""
    model: Any = net()
    model.head.weight._in_backward_optimizers = []
    return ddp(model)


def replicated(*names: str) -> Any:
    """Parts of the model, or all of it."""
    model: Any = net()
    for name in names or ("first", "second", ""):
        replicate(model.get_submodule(name))
    return model


def hybrid() -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    how: Any = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    return FSDP(net(), device_id=CPU, **how)


def in_float64() -> Any:
    return FSDP(net().double(), device_id=CPU)


def of_both_apis() -> Any:
    both: Any = nn.Sequential(FSDP(nn.Linear(4, 4), device_id=CPU), nn.Linear(4, 4))
    fully_shard(both[1])
    return both


def of_fsdp2_and_replicate() -> Any:
    model = replicated("first")
    fully_shard(model.second)
    return model


def with_own_all_gather() -> Any:
    model = sharded()
    model.second.set_custom_all_gather(object())
    return model


def in_two_hybrid_meshes() -> Any:
    mixed, mesh = net(), two_by_two()
    fully_shard(mixed.first, mesh=mesh)
    return fully_shard(mixed, mesh=mesh["shard"])


def with_groups_of_pairs() -> Any:
    in_two_meshes(model := block_net.net())
    return model


# How the model is shared; the policy; options of `wrap`, or what makes them; words of the error.
COPIES = {"replicas": lambda: two_by_two()["replicate"]}
Case = tuple[Callable[[], Any], Any, dict[str, Any], str]
REFUSED: dict[int, list[Case]] = {
    2: [
        (net, EVERYTHING, {}, "is not sharded: call torch.distributed.fsdp.fully_shard"),
        (sharded, {"schema": 1, "gradients": [NOBODY]}, {}, "compresses nothing in this model"),
        (lambda: wrapped(BITS), EVERYTHING, {}, ".remove()"),
        (lambda: wrapped(BITS).second, EVERYTHING, {}, "already wrapped"),
        (lambda: nn.Sequential(wrapped(BITS)), EVERYTHING, {}, "already wrapped"),
        (with_own_all_gather, gathering(INT8), {}, "'second' has its own all-gather, object"),
        (sharded, gathering({"kind": "exact"}), {}, "gathered in float32"),
        (
            sharded,
            gathering({"kind": "delta", "bits": 2}, "*"),
            {},
            "unit '(root)' has norm.weight, norm.bias and 1 more with one dimension only",
        ),
        # DDP
        (ddp, REPLICAS, {}, "all ranks are replicas"),
        (ddp, BITS, {"replicas": lambda: dist.group.WORLD}, "all ranks are replicas"),
        (hooked, BITS, {}, "its own communication hook (allreduce_hook)"),
        (lambda: ddp(nn.Embedding(9, 9, sparse=True)), BITS, {}, "sparse gradients"),
        (stepping_in_backward, BITS, {}, "an optimizer in its backward"),
        (lambda: nn.Sequential(wrapped(BITS, ddp())), BITS, {}, "'0' is already wrapped"),
        # replicate
        (lambda: nn.Sequential(with_hooks(nn.Linear(9, 9))), BITS, {}, "whose hooks tagc cannot"),
        (of_fsdp2_and_replicate, "hybrid", {}, "partly by FSDP2 (fully_shard), partly by repl"),
        (replicated, REPLICAS, {}, "with DDP and replicate() all ranks are replicas"),
        # FSDP1
        (by_fsdp1, REPLICAS, {}, "averages over replicas for FSDP2 only"),
        (by_fsdp1, "dense", {"replicas": lambda: dist.group.WORLD}, "replicas for FSDP2 only"),
        (hybrid, EVERYTHING, {}, 'replicas=mesh["replicate"]'),
        (lambda: wrapped(BITS, by_fsdp1()).second, EVERYTHING, {}, "already wrapped, by"),
        (of_both_apis, EVERYTHING, {}, "partly by FSDP1"),
        (in_float64, BITS, {}, "give it a MixedPrecision(reduce_dtype=torch.float32)"),
    ],
    4: [
        # Hosts
        (sharded, BITS, {"hosts": 3}, "does not divide"),
        (sharded, REPLICAS, {"replicas": lambda: 5}, "has type int; give the dimension of the"),
        (sharded, BITS, {"hosts": 4}, "single host"),
        (sharded, BITS, {"hosts": "2"}, "it must be 'auto'"),
        (by_fsdp1, BITS, {"hosts": 2}, "use FSDP2 (fully_shard), or pass hosts=None"),
        # Replicas that are given twice, or not at all; units with other replicas than the rest.
        (lambda: sharded(mesh=two_by_two()), "loco-4bit", COPIES, "leave replicas out"),
        (in_two_hybrid_meshes, "loco-4bit", {}, "replicated over different ranks"),
        (lambda: small_net.two_by_two()[0], REPLICAS, {}, 'replicas=mesh["replicate"]'),
        # Averaged, their shards would be mixed up without a word.
        (
            with_groups_of_pairs,
            block_net.WEIGHTS,
            COPIES,
            "is sharded over ranks that replicas=... says are replicas of each other",
        ),
    ],
}


@on_ranks(2, 4, timeout=120)
def test_what_is_refused(rank: int, world_size: int) -> None:
    for make, policy, options, message in REFUSED[world_size]:
        model = make()
        given: dict[str, Any] = {
            name: value() if callable(value) else value for name, value in options.items()
        }
        groups = len(dist.distributed_c10d._world.pg_names)
        before = hooks_of(model)
        kind, text = fails(lambda m=model, p=policy, g=given: tagc.wrap(m, p, **g))
        assert kind in ("ValueError", "PolicyError"), (message, text)
        assert message in text, (message, text)
        assert len(dist.distributed_c10d._world.pg_names) == groups, message
        assert hooks_of(model) == before, message
        if "already" not in text:
            kind, text = fails(lambda m=model: tagc.compressor(m))
            assert (kind, "not wrapped: call tagc.wrap(" in text) == ("ValueError", True), text


def hooks_of(model: nn.Module) -> list[Any]:
    """What others may hang into a model's modules."""
    return [
        (getattr(m, "_comm_hook", None), len(m._forward_pre_hooks), len(m._forward_hooks))
        for m in model.modules()
    ]


@on_ranks(2)
def test_what_depends_on_more_than_the_model(rank: int, world_size: int) -> None:
    model = sharded()
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        tagc.wrap(model, "dense")
    tagc.wrap(model, "dense")
    with patch.object(fsdp2, "all_reduces_by_class", lambda: False):
        _, text = fails(lambda: tagc.wrap(replicated(), "hybrid"))
    assert "cannot replace the all-reduce of this version of torch; use Distributed" in text


def test_stand_ins_for_process_groups() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        for policy in (EVERYTHING, "dense", "hybrid"):
            with pytest.raises(ValueError, match=r"backend 'fake'.*gloo or nccl.*tagc\.explain"):
                tagc.wrap(sharded(), policy)
    finally:
        dist.destroy_process_group()


# Ranks that differ, or of which one fails


def wrap_and_train(policy: Any = EVERYTHING, model: Any = None, **options: Any) -> None:
    model = wrapped(policy, model, **options)
    loss_of(model, 0, 0).backward()


def with_environment(**variables: str) -> Callable[[], None]:
    """Wrapped by the policy that the environment names, if it does."""

    def call() -> None:
        with patch.dict(os.environ, variables):
            tagc.wrap(sharded(), None if "TAGC_POLICY" in variables else EVERYTHING)

    return call


def of_another_version() -> None:
    with patch("tagc.handle.wrapper.__version__", "0.0.0"):
        wrap_and_train()


# What rank 1 does, its kind of error, and what the others' errors say. (Its own, if None.)
DIFFERING: list[tuple[Callable[[], Any], str | None, str]] = [
    (partial(wrap_and_train, BITS), None, "tagc policy differs between ranks: rank 0"),
    (
        lambda: wrap_and_train(model=fully_shard(net())),
        None,
        "tagc unit 0 differs between ranks: rank 0 has",
    ),
    (lambda: wrap_and_train(hosts=None), None, "tagc hosts differs between ranks: rank 0 has"),
    (
        lambda: wrap_and_train(model=by_fsdp1()),
        None,
        "tagc model differs between ranks: rank 0 has",
    ),
    (of_another_version, None, "tagc version differs between ranks: rank 0 has"),
    (with_environment(TAGC_DISABLE="yes"), "ValueError", "TAGC_DISABLE is 'yes'"),
    (with_environment(TAGC_POLICY="one-bt"), "PolicyError", "did you mean 'one-bit'?"),
    (lambda: wrap_and_train(ops="cqu"), "ValueError", "tagc.wrap failed on rank 1"),
]


@on_ranks(3, timeout=120)
def test_ranks_that_differ(rank: int, world_size: int) -> None:
    for differs, expected, message in DIFFERING:
        kind, text = fails(differs if rank == 1 else wrap_and_train)
        if rank == 1 and expected is not None:
            assert kind in (expected, "PolicyError"), text
        else:
            assert kind == "RuntimeError", text
            assert message in text, text
            assert "rank 1" in text
    model = wrapped(BITS)
    kind, text = fails(lambda: wrapped(BITS, model if rank == 1 else None))
    assert kind == ("ValueError" if rank == 1 else "RuntimeError")
    assert ("tagc.wrap failed on rank 1" in text) == (rank != 1), text
    # And nobody is worse off.
    loss_of(model, rank, 0).backward()
    wrap_and_train()
