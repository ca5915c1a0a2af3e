"""State: what is saved, and that training goes on from it as if it had never stopped."""

from __future__ import annotations

import re
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.small_net import local_weights
from support.states import (
    POLICIES,
    load,
    residual_sums,
    run,
    set_weights,
    shared_folder,
    snapshot,
    wrapped,
)


@on_ranks(2)
def test_a_residual_lies_where_the_gradient_does(rank: int, world_size: int) -> None:
    """What is not sent in the first step is the gradient itself, by rows and by columns sharded."""

    def layers() -> Any:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 7))

    alone, model = layers(), layers()
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.shape[-1:] == (6,) else None)
    wrapped(POLICIES["sketch"], model)
    x = torch.linspace(-1, 1, 12).view(2, 6) + rank
    for one in (alone, model):
        one(x).square().sum().backward()
    residuals = residual_sums(model)
    assert set(residuals) == {"0.weight", "1.weight"}
    for name, residual in residuals.items():
        grad = alone.get_parameter(name).grad
        assert grad is not None
        assert 0.5 < (residual == grad.double()).float().mean() < 1
    compressor = tagc.compressor(model)
    state = compressor.state_dict()
    compressor.load_state_dict(state)
    equal(compressor.state_dict(), state)


# What is in a state


@on_ranks(2)
def test_names_shapes_and_metadata(rank: int, world_size: int) -> None:
    model = wrapped(POLICIES["sketch"])
    run(model, rank, range(2))
    compressor = tagc.compressor(model)
    assert isinstance(compressor, Stateful)
    state = compressor.state_dict()
    assert all(isinstance(tensor, Tensor) for tensor in state.values())
    policy = compressor.plan().policy
    starts = {re.split(r"(?<=rank_\d)\.", name)[0] for name in state}
    layout = compressor.plan().fingerprint
    assert starts == {f"of_2_ranks.policy_{policy.hash[:12]}.layout_{layout[:12]}.rank_{rank}"}
    shapes = {n: p.shape for n, p in model.named_parameters() if n.endswith("weight")}
    assert {n: t.shape for n, t in residual_sums(model).items()} == shapes
    with shared_folder() as folder:
        compressor.save(folder)
        (file,) = folder.glob(f"rank-0000{rank}-of-00002-*.safetensors")
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
            assert set(opened.keys()) == {re.split(r"rank_\d\.", n)[1] for n in list(state)[1:]}
        assert metadata["policy"] == "<dict>"
        assert metadata["policy_hash"] == policy.hash
        assert metadata["layout"] == layout
        assert (metadata["step"], metadata["rank"], metadata["world_size"]) == ("2", str(rank), "2")
        assert metadata["version"] == tagc.__version__
        dist.barrier()
        # A second save takes the place of the first, files and all.
        run(model, rank, range(1))
        compressor.save(folder)
        dist.barrier()
        assert len(list(folder.iterdir())) == 3
        assert not file.exists()


@on_ranks(2)
@pytest.mark.parametrize("loader", ["dcp", "folder"])
def test_training_goes_on(rank: int, world_size: int, loader: str) -> None:
    """``dcp.async_save`` writes the state of its call."""
    model, resumed = (wrapped(POLICIES["changes"]) for _ in range(2))
    run(model, rank, range(3))
    weights = local_weights(model)
    saving: Any = dist.new_group(backend="gloo")
    with shared_folder() as folder:
        state = {"tagc": tagc.compressor(model)}
        written = dcp.async_save(state, checkpoint_id=folder, process_group=saving)
        run(model, rank, range(3, 6))
        assert isinstance(written, Future)
        written.result()
        set_weights(resumed, weights)
        load(resumed, folder, loader)
    run(resumed, rank, range(3, 6))
    expected, found = snapshot(model), snapshot(resumed)
    for metrics in (expected.pop("metrics"), found.pop("metrics")):
        assert metrics
    equal(found, expected)


# What is loaded


@on_ranks(2)
def test_ranks_must_load_the_same_save(rank: int, world_size: int) -> None:
    model = wrapped(POLICIES["sketch"])
    compressor = tagc.compressor(model)
    states = []
    for step in range(2):
        run(model, rank, range(step, step + 1))
        states.append(compressor.state_dict())
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="All ranks must load what was saved together"):
        compressor.load_state_dict(states[rank])
    equal(snapshot(model), before)


@on_ranks(2)
def test_key_of_a_checkpoint(rank: int, world_size: int) -> None:
    model = wrapped(POLICIES["sketch"])
    run(model, rank, range(2))
    compressor = tagc.compressor(model)
    with shared_folder() as folder:
        dcp.save({"app": {"comm": compressor.state_dict()}}, checkpoint_id=folder)
        with pytest.raises(tagc.StateError, match=r"nothing in this checkpoint is called 'tagc'"):
            compressor.load(folder)
        before = compressor.state_dict()
        run(model, rank, range(2))
        compressor.load(folder, key="app.comm")
        equal(compressor.state_dict(), before)
