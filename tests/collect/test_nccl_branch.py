"""The branch for NCCL, on gloo: collectives instead of messages, stamps instead of headers, sums of
the backend. It must come to the same bits, in the calls that docs/architecture.md lists."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import tagc
from support.block_net import wrap
from support.distributed import as_on_nccl, on_ranks
from support.marks import slow
from support.paths import ROOT
from support.small_net import local_weights
from support.uneven_block import SHIPPED, data, end_warm_up, sharded
from tagc.costs.auto import FastestChoice
from tagc.costs.link import Link
from tagc.costs.speed import no_time
from tagc.handle import wrapper

WAYS = {"flat": 2, "hosts": 4, "replicas": 4}


class Counted(TorchDispatchMode):
    """Counts the calls of all process groups' backends, FSDP's own included. Asynchronous ones,
    which a GPU runs on the group's own stream, count once more, with a star."""

    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self._calls[func._opname] += 1
            names = [argument.name.replace("_", "").lower() for argument in func._schema.arguments]
            # Arguments are left out if they have their default, which is true.
            if all(args[names.index("asyncop") :][:1]):
                self._calls[f"{func._opname}*"] += 1
        return func(*args, **kwargs or {})


def trained(
    rank: int,
    policy: Any,
    way: str,
    calls: Counter[str] | None = None,
    dtypes_of: Any = None,
) -> dict[str, Tensor]:
    """Weights, and all that tagc would save, after two steps.

    Args:
        policy: a policy's name; None to train without tagc.
        calls: counts the calls of the second step.
        dtypes_of: the policy whose dtypes the model has; by default its own.
    """
    options: dict[str, Any] = {}
    if way == "replicas":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model = sharded(dtypes_of or policy or "dense", **options)
    if policy is not None:
        # Messages of exact changes take the eager operators long.
        wrap(model, policy, hosts=2 if way == "hosts" else None, ops="cpu")
        end_warm_up(tagc.compressor(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        with Counted(calls) if calls is not None and step == 1 else nullcontext():
            model(data(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {} if policy is None else dict(tagc.compressor(model).state_dict())
    return local_weights(model) | state


def same_bits(forced: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    for name, tensor in others.items():
        if ".about" not in name:
            assert torch.equal(forced[name], tensor), name


NAMES = {
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "allreduce_": "all-reduce",
}


def cell(calls: Counter[str]) -> str:
    """Calls of a unit, of which there are two: the root has no parameters. Only sketches have
    anything in flight: their counts, which the next step reads."""
    assert set(calls) <= {*NAMES, "allreduce_*"}
    found: Counter[str] = Counter()
    for name, shown in NAMES.items():
        found[shown] += calls[name]
    assert not any(count % 2 for count in found.values())
    return ", ".join(f"{count // 2} {shown}" for shown, count in found.items() if count)


def documented(policy: str, way: str) -> str:
    text = (ROOT / "docs" / "architecture.md").read_text().split("## Collectives on NCCL")[1]
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `{policy}` |")][:1]
    return line.strip("| ").split(" | ")[1 + [*WAYS].index(way)]


QUICK = [("attn-only", "flat"), ("hybrid", "hosts")]


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "policy", "way"),
    [
        (ranks, policy, way) if (policy, way) in QUICK else slow(ranks, policy, way)
        for policy, (way, ranks) in product(SHIPPED, WAYS.items())
    ],
)
def test_the_same_bits(rank: int, world_size: int, policy: str, way: str) -> None:
    calls: Counter[str] = Counter()
    with as_on_nccl():
        forced = trained(rank, policy, way, calls)
    if any(rule.codec.kind == "exact" for rule in tagc.Policy.load(policy).parameters):
        calls["_allgather_base_"] -= 2 if way == "hosts" else 1  # sizes of both units
    assert cell(calls) == documented(policy, way), cell(calls)
    if policy in ("dense", "exact") and way == "hosts":
        # Gradients are left to the backend; gloo's own branch adds up inside hosts first.
        others = trained(rank, None, "flat", dtypes_of=policy)
    else:
        others = trained(rank, policy, way)
    same_bits(forced, others)


@pytest.mark.slow
@on_ranks(4)
def test_messages_inside_hosts_go_in_one_call(rank: int, world_size: int) -> None:
    policy = {"schema": 1, "extends": "hybrid", "inside": "int8"}
    calls: Counter[str] = Counter()
    with as_on_nccl():
        forced = trained(rank, policy, "hosts", calls)
    assert cell(calls) == "2 all-to-all, 2 all-gather"
    same_bits(forced, trained(rank, policy, "hosts"))


@on_ranks(4)
def test_on_a_fast_link_the_calls_are_fsdps_own(rank: int, world_size: int) -> None:
    """By default, too: `auto` measures over groups of hosts, and lets go of them."""
    calls: Counter[str] = Counter()
    native: Counter[str] = Counter()
    link = Link(bandwidth=1e15, latency=1e-5)
    chosen = FastestChoice(lambda position, direction: link, no_time)
    weights = trained(rank, None, "hosts", native)
    before = len(dist.distributed_c10d._world.pg_map)
    with as_on_nccl(), patch.object(wrapper, "measured_choice", return_value=chosen):
        forced = trained(rank, "auto", "hosts", calls)
    assert calls == native, (calls, native)
    assert len(dist.distributed_c10d._world.pg_map) == before
    same_bits(forced, weights)
