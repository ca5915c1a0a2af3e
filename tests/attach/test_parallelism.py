"""torch's tensor, sequence, expert and pipeline parallelism through groups that compress, and FSDP2
on tensor parallelism."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import tagc
from support.block_net import wrap
from support.coded_mesh import mesh_of, policy
from support.distributed import fails, on_ranks
from support.parallel_net import loss_of, parallel
from tagc.groups.mesh import bytes_by_dimension


class Mlp(nn.Module):
    """A block of a tensor-parallel model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


def in_tensor_parallel(mesh: Any, sequence: bool) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(Mlp(), Mlp())
    split: dict[str, Any] = {}
    for i in range(2):
        if sequence:
            split[f"{i}.norm"] = SequenceParallel()
            split[f"{i}.up"] = ColwiseParallel(input_layouts=Shard(1))
            split[f"{i}.down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        else:
            split[f"{i}.up"], split[f"{i}.down"] = ColwiseParallel(), RowwiseParallel()
    if sequence:
        split["0"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
        )
        split["1"] = PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate()
        )
    return parallelize_module(model, mesh, split)


def gradients(model: nn.Module, x: Tensor, *, again: bool = False) -> tuple[Tensor, Tensor]:
    """The loss, and all gradients; with activations computed once more in backward, if asked."""
    run = (lambda t: checkpoint(model, t, use_reentrant=False)) if again else model
    loss = run(x).square().mean()
    loss.backward()
    found = []
    for p in model.parameters():
        grad: Any = p.grad
        found.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).flatten())
        p.grad = None
    return loss.detach(), torch.cat(found)


def near(mine: tuple[Tensor, Tensor], native: tuple[Tensor, Tensor]) -> None:
    """Other bits, but not far: 8 bits are off by 1/254 of a block's largest at most."""
    assert not torch.equal(mine[1], native[1])
    for a, b in zip(mine, native, strict=True):
        assert (a - b).norm() < 0.015 * b.norm(), (a - b).norm() / b.norm()


def has_torchs_bits(mine: Any, native: Any, dimension: str, most: float = 0.77) -> None:
    """Codec ``exact`` changes nothing but bytes."""
    assert all(map(torch.equal, mine, native))
    sent = bytes_by_dimension()[dimension]
    assert 0 < sent.wire_bytes <= most * sent.dense_bytes, sent


@on_ranks(2)
def test_tensor_parallel(rank: int, world_size: int) -> None:
    """Of sequences, too; without these is in `test_with_sharded_data_parallelism`."""
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(2))
    plain = init_device_mesh("cpu", (2,), mesh_dim_names=("native",))
    native = gradients(in_tensor_parallel(plain, True), x)
    model = in_tensor_parallel(mesh_of(2), True)
    before = gradients(model, x)
    assert before[0] == native[0]  # only the backward was compressed
    assert all(map(torch.equal, gradients(model, x, again=True), before))
    tagc.compress_activations(model)
    mine = gradients(model, x)
    near(mine, native)
    assert all(map(torch.equal, gradients(model, x, again=True), mine))

    x = x.bfloat16()
    native = gradients(in_tensor_parallel(plain, True).bfloat16(), x)
    model = in_tensor_parallel(mesh_of(2, names=("cp",), bits=0), True).bfloat16()
    tagc.compress_activations(model)
    has_torchs_bits(gradients(model, x), native, "cp", most=0.85)  # gradients are gathered whole
    has_torchs_bits(gradients(model, x, again=True), native, "cp", most=0.85)


@on_ranks(3)
def test_exact_experts(rank: int, world_size: int) -> None:
    """Tokens to their experts and back, unevenly, and their gradients."""

    def run(mesh: Any, forward: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        expert, group = nn.Linear(64, 64).bfloat16(), mesh.get_group()
        sizes = [[40 + 20 * ((r + 2 * d) % world_size) for d in range(world_size)]
                 for r in range(world_size)]  # fmt: skip
        leaving, arriving = sizes[rank], [row[rank] for row in sizes]
        x = torch.randn(sum(leaving), 64).bfloat16().requires_grad_()
        with forward:
            there = functional.all_to_all_single_autograd(x, arriving, leaving, group)
            back = functional.all_to_all_single_autograd(expert(there), leaving, arriving, group)
        loss = back.square().mean()
        loss.backward()
        return loss.detach(), x.grad, expert.weight.grad  # type: ignore[return-value]

    native = run(init_device_mesh("cpu", (world_size,), mesh_dim_names=("n",)), nullcontext())
    mine = run(mesh_of(world_size, names=("ep",), bits=0), tagc.activations())
    has_torchs_bits(mine, native, "ep")


@on_ranks(2)
def test_pipelines(rank: int, world_size: int) -> None:
    both = torch.randn(2, 4, 32, 64, generator=torch.Generator().manual_seed(2))

    def run(mesh: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        parts = [Mlp().to(dtype) for _ in range(4)]
        x, wanted = both.to(dtype)
        group, cpu = mesh.get_group(), torch.device("cpu")
        stages: Any = [PipelineStage(parts[i], i, 4, cpu, group=group) for i in (rank, rank + 2)]
        runs = ScheduleInterleaved1F1B(stages, 2, loss_fn=nn.functional.mse_loss)
        losses: list[Tensor] = []
        if rank == 0:
            runs.step(x)
        else:
            runs.step(target=wanted, losses=losses)
        found = [p.grad.flatten() for s in stages for p in s.submod.parameters()]
        return torch.stack([t.detach() for t in losses] or [torch.ones(())]), torch.cat(found)

    plain = init_device_mesh("cpu", (2,), mesh_dim_names=("native",))
    near(run(mesh_of(2, names=("pp",))), run(plain))
    exact = mesh_of(2, names=("cp",), bits=0)
    has_torchs_bits(run(exact, torch.bfloat16), run(plain, torch.bfloat16), "cp", most=0.775)


@on_ranks(4)
def test_with_sharded_data_parallelism(rank: int, world_size: int) -> None:
    """FSDP2 over one dimension, tensor parallelism over the other, one policy for both."""
    whole = {**policy(), "extends": "hybrid"}
    whole["gradients"] = [
        {"when": {"name": "*weight"}, "codec": {"kind": "quantized", "bits": 8, "block": 32}}
    ]
    mesh = tagc.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), policy=whole)
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(rank // 2))

    def made() -> Any:
        model = in_tensor_parallel(mesh["tp"], False)
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    kind, text = fails(lambda: tagc.wrap(made(), "hybrid"))
    assert kind == "PolicyError", text
    assert "says nothing for dimension 'tp'" in text, text
    dithered = {"kind": "quantized", "rounding": "stochastic"}
    _, text = fails(lambda: tagc.wrap(made(), {**whole, "dimensions": {"tp": {"codec": dithered}}}))
    assert "rounding='stochastic' for dimension 'tp'" in text, text
    assert "rounding='nearest': make the mesh" in text, text
    native = made()
    with patch.object(mesh.get_group("tp"), "_compresses", False):
        reference = gradients(native, x)
    model = tagc.wrap(made(), whole)
    before = bytes_by_dimension()["tp"]
    model(x).square().mean().backward()
    after = tagc.compressor(model).metrics().as_dict()
    sent = after["tp_wire_bytes"] - before.wire_bytes
    assert sent < 0.3 * (after["tp_dense_bytes"] - before.dense_bytes)
    assert "tp " in str(tagc.compressor(model).metrics())
    model.zero_grad()
    mine = gradients(model, x)
    near(mine, reference)
    assert all(map(torch.equal, saved(interrupted(model, x)), saved(model)))
    tagc.compressor(model).remove()
    assert gradients(model, x)[0] == reference[0]  # only the backward is compressed


def interrupted(model: Any, x: Tensor) -> Any:
    """The model, in the handler of an exception that ends its forward."""
    broken = patch.object(model[1].down, "forward", side_effect=KeyboardInterrupt)
    with broken, pytest.raises(KeyboardInterrupt):
        model(x)
    return model


def saved(model: Any) -> list[Tensor]:
    return [
        t.full_tensor() if hasattr(t, "full_tensor") else t for t in model.state_dict().values()
    ]


# What all tensor-parallel ranks have stays the same on all of them


CODECS: dict[str, dict[str, Any]] = {
    "by chance": {
        "codec": {"kind": "quantized", "bits": 4, "block": 32, "rounding": "stochastic"},
        "feedback": {"kind": "none"},
    },
    "sketch": {"codec": {"kind": "sketch", "density": 0.3}},
}


@on_ranks(4)
@pytest.mark.parametrize("codec", CODECS)
def test_parameters_that_are_not_divided_stay_alike(rank: int, world_size: int, codec: str) -> None:
    """The norm and the head: though others share their rule and role, and stand beside them in the
    unit."""
    # Chance depends on columns, which differ where 13 rows are divided by 2.
    model = parallel(2, 2, in_one_unit=codec != "by chance")
    rule = {"when": {"name": "*.weight"}, **CODECS[codec]}
    wrap(model, {"schema": 1, "roles": {"mlp": "*"}, "gradients": [rule]})
    for unit in tagc.compressor(model).plan().units:
        assert all(segment.compressed for segment in unit.segments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        loss_of(model, rank // 2, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name in ("norm.weight", "head.weight"):
        param: Any = dict(model.named_parameters())[name]
        mine = param.to_local().detach().contiguous()
        everyones = [torch.empty(0)] * world_size
        dist.all_gather_object(everyones, mine)
        assert torch.equal(everyones[rank], everyones[rank ^ 1]), name
