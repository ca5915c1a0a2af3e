"""The branch for NCCL, on gloo: collectives instead of messages, stamps instead of headers, sums of
the backend. It must come to the same bits, in the calls that docs/architecture.md lists."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tagc
from support.block_net import wrap
from support.distributed import as_on_nccl, on_ranks
from support.paths import ROOT
from support.small_net import local_weights
from support.uneven_block import Block
from tagc.collect import transport
from tagc.policy import data_parallel_policies

POLICIES = sorted(set(data_parallel_policies()) - {"auto"})
WAYS = ("flat", "hosts", "replicas")


@contextmanager
def counted(calls: Counter[str]) -> Iterator[None]:
    """Counts what the library asks of the backend."""

    def count(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    replaced = SimpleNamespace(**vars(dist))
    for name in ("all_to_all_single", "all_to_all", "all_reduce", "all_gather", "isend"):
        setattr(replaced, name, count(name, getattr(dist, name)))
    with ExitStack() as stack:
        stack.enter_context(patch.object(transport, "dist", replaced))
        for name in ("reduce_scatter", "all_gather"):
            changed = count(f"{name}_single", getattr(transport, name))
            stack.enter_context(patch.object(transport, name, changed))
        yield


def trained(
    rank: int, policy: str, way: str, calls: Counter[str] | None = None
) -> dict[str, Tensor]:
    """Weights, and all that tagc would save, after three steps."""
    options: dict[str, Any] = {}
    if way == "replicas":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    torch.manual_seed(1)
    model: Any = nn.Sequential()
    model.layers = nn.Sequential(Block(), Block())
    for block in model.layers:
        fully_shard(block, **options)
    wrap(fully_shard(model, **options), policy, hosts=2 if way == "hosts" else None)
    for reducer in tagc.compressor(model).reducers:
        reducer.counters.steps = reducer.plan.warmup_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        with ExitStack() as stack:
            if calls is not None and step == 2:
                stack.enter_context(counted(calls))
            seed = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(5, 131, generator=seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return local_weights(model) | dict(tagc.compressor(model).state_dict())


NAMES = {
    "reduce_scatter_single": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "all_gather_single": "all-gather",
    "all_gather": "all-gather of rows",
    "all_reduce": "all-reduce",
}


def cell(calls: Counter[str]) -> str:
    """Calls of a unit, of which there are two: the root has no parameters."""
    assert set(calls) <= set(NAMES)
    assert not any(count % 2 for count in calls.values())
    said = [f"{calls[name] // 2} {shown}" for name, shown in NAMES.items() if calls[name]]
    return ", ".join(said)


def documented(policy: str, way: str) -> str:
    text = (ROOT / "docs" / "architecture.md").read_text().split("## Collectives on NCCL")[1]
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `{policy}` |")][:1]
    return line.strip("| ").split(" | ")[1 + WAYS.index(way)]


@pytest.mark.some(8)
@on_ranks(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_bits(rank: int, world_size: int, policy: str, way: str) -> None:
    calls: Counter[str] = Counter()
    with as_on_nccl():
        forced = trained(rank, policy, way, calls)
    assert cell(calls) == documented(policy, way), cell(calls)
    for name, tensor in trained(rank, policy, way).items():
        if ".about" not in name:
            assert torch.equal(forced[name], tensor), name


@on_ranks(2)
def test_gathers_that_a_policy_leaves_alone_are_fsdps_own(rank: int, world_size: int) -> None:
    """There are no headers to compare first."""
    model: Any = fully_shard(Block())
    with as_on_nccl():
        wrap(model, "packed-20", hosts=None)
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    assert type(group._all_gather_comm).__module__.startswith("torch.")


@pytest.mark.slow
def test_the_programme_for_gpus_runs_on_gloo() -> None:
    """`nccl_ranks`, which compares on GPUs, has found nothing if it cannot run."""
    command = [sys.executable, "-m", "nccl_ranks", "--device", "cpu", "--seconds", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.endswith(" equal")
    assert last.startswith("no time for ")
