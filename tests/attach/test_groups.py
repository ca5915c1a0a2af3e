"""Groups that compress: every collective against arithmetic of its own, and torch's parallelism."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.functional import pad

import tagc
from support.distributed import on_ranks
from support.failing import fails
from tagc.attach.groups import bytes_by_dimension
from tagc.collect.activations import SMALL_MESSAGE
from tagc.collect.transport import all_gather, reduce_scatter
from tagc.ops import get_ops
from tagc.ops.blocks import BlockLayout

N = 3 * SMALL_MESSAGE + 40
"""Elements for one rank: not a multiple of a row."""


STOCHASTIC = {"kind": "quantized", "bits": 4, "block": 32, "rounding": "stochastic"}


def policy(bits: int = 8, block: int = 64) -> dict[str, Any]:
    codec = {"kind": "quantized", "bits": bits, "block": block}
    rule = {"codec": codec}
    return {
        "schema": 1,
        "gradients": [{"when": {}, "codec": {"kind": "dense"}}],
        "dimensions": {"tp": rule, "pp": rule, "ep": rule},
    }


def mesh_of(*shape: int, names: tuple[str, ...] = ("tp",), **codec: Any) -> Any:
    return tagc.init_device_mesh("cpu", shape, mesh_dim_names=names, policy=policy(**codec))


def coded(t: Tensor, bits: int = 8, block: int = 64) -> Tensor:
    """What arrives of ``t``, in float32: each block rounded by itself."""
    flat = t.float().reshape(-1)
    blocks = pad(flat, (0, -flat.numel() % block)).view(-1, block)
    levels = 2 ** (bits - 1) - 1
    scale = (blocks.abs().amax(1) * torch.tensor(1 / levels)).bfloat16().float()[:, None]
    codes = (blocks * (1 / scale)).clamp(-levels, levels).round()
    return (codes * scale).view(-1)[: flat.numel()].view(t.shape)


def added(rows: list[Tensor]) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def test_the_arithmetic_of_these_tests_is_that_of_the_operators() -> None:
    t = torch.randn(4096)
    layout = BlockLayout(numel=4096, bits=8, block=64)
    message, out = torch.empty(1, layout.words, dtype=torch.int32), torch.empty(1, 4096)
    ops = get_ops("cpu", "reference")
    ops.quantize(t[None], None, message, layout=layout, average=0.0)
    ops.dequantize(message[None], out, layout=layout, divisor=1)
    assert torch.equal(out[0], coded(t))


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "block"), [(8, 64), (4, 32)])
def test_every_collective(
    rank: int, world_size: int, dtype: torch.dtype, bits: int, block: int
) -> None:
    """To the bit, by torch's functions and by its functional collectives, and all at once."""
    W = world_size
    how: Any = {"bits": bits, "block": block}
    mesh: Any = mesh_of(W, **how)
    group = mesh.get_group()
    torch.manual_seed(5)
    # For each rank, a row for each rank.
    everything = torch.randn(W, W, N).to(dtype)
    mine = everything[rank]
    sent = [[coded(part, **how) for part in row] for row in everything]
    one = [[coded(part, **how) for part in row] for row in everything[:, :1]]
    of_all = [part for (part,) in one]

    sums = [added([sent[r][d] for r in range(W)]) for d in range(W)]
    gathered = torch.stack(of_all).to(dtype)
    whole = [coded(row, **how) for row in everything]
    total = added(whole) if W == 2 else coded(added(whole), **how)

    with tagc.activations():
        out, parts = torch.empty(W, N, dtype=dtype), [torch.empty(N, dtype=dtype) for _ in range(W)]
        shard, listed = torch.empty(N, dtype=dtype), torch.empty(N, dtype=dtype)
        reduced, mean = mine.clone(), mine.clone()
        works = [
            all_gather(out.view(-1), mine[0], group=group, async_op=True),
            dist.all_gather(parts, mine[0], group=group, async_op=True),
            reduce_scatter(shard, mine.view(-1), group=group, async_op=True),
            dist.reduce_scatter(listed, list(mine), group=group, async_op=True),
            dist.all_reduce(reduced, group=group, async_op=True),
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=group, async_op=True),
        ]
        # In any order: each holds what it needs.
        for work in reversed(works):
            assert work is not None
            work.wait()
        several = [t + 0 for t in functional.all_reduce_coalesced([mine, mine], "sum", group)]
        several.append(functional.all_reduce(mine, "sum", (mesh, 0)) + 0)
    assert torch.equal(out, gathered)
    assert torch.equal(torch.stack(parts), gathered)
    assert torch.equal(shard, sums[rank].to(dtype))
    assert torch.equal(listed, sums[rank].to(dtype))
    for t in (reduced, *several):
        assert torch.equal(t, total.to(dtype))
    averaged = added(whole) / W
    assert torch.equal(mean, (averaged if W == 2 else coded(averaged, **how)).to(dtype))


@on_ranks(2)
def test_stochastic_rounding(rank: int, world_size: int) -> None:
    """Right on average, and the same bits for the same elements."""
    mesh: Any = tagc.init_device_mesh(
        "cpu",
        (2,),
        mesh_dim_names=("tp",),
        policy=policy() | {"dimensions": {"tp": {"codec": STOCHASTIC}}},
    )
    group = mesh.get_group()
    for dtype in (torch.float32, torch.bfloat16):
        means = torch.zeros(N)
        for turn in range(64):
            t = torch.full((N,), 0.3, dtype=dtype)
            t[::32] = 7  # the largest of each block, and 7 codes
            t[1] = turn / 64  # other elements, other chance
            sent = t.expand(2, -1).contiguous()
            out = [torch.empty(N, dtype=dtype) for _ in range(2)]
            with tagc.activations():
                dist.all_gather(out, sent[rank], group=group)
                again = [torch.empty(N, dtype=dtype) for _ in range(2)]
                dist.all_gather(again, sent[rank], group=group)
            assert torch.equal(torch.stack(out), torch.stack(again))
            means += out[0].float() / 64
        # 64 draws of 1 with the chance 0.3, in the first row, whose elements change.
        assert abs(means[2:512].mean() - t[2:512].float().mean()) < 0.02


@on_ranks(2, 3)
def test_uneven_all_to_all(rank: int, world_size: int) -> None:
    """As experts' tokens: other sizes for every pair, some small, some none."""
    group = mesh_of(world_size, names=("ep",)).get_group()
    torch.manual_seed(5)
    tokens = [[0, 100, 7], [64, 0, 33], [1, 40, 90]]
    sizes = [row[:world_size] for row in tokens[:world_size]]
    sent = [[torch.randn(n, 96) for n in row] for row in sizes]
    wanted = [t if t.numel() < SMALL_MESSAGE else coded(t) for t in (r[rank] for r in sent)]
    receives = [row[rank] for row in sizes]
    out, listed = torch.empty(sum(receives), 96), [torch.empty(n, 96) for n in receives]
    with tagc.activations():
        dist.all_to_all_single(out, torch.cat(sent[rank]), receives, sizes[rank], group=group)
        dist.all_to_all(listed, sent[rank], group=group)
        again = functional.all_to_all_single(
            torch.cat(sent[rank]), receives, sizes[rank], group
        ).clone()
    for got in (out, torch.cat(listed), again):
        assert torch.equal(got, torch.cat(wanted))


@on_ranks(2)
def test_both_send_before_they_receive(rank: int, world_size: int) -> None:
    """As two stages of a pipeline do; also without a forward, into a tensor for gradients."""
    group = mesh_of(2, names=("pp",)).get_group()
    theirs = torch.randn(2, N, generator=torch.Generator().manual_seed(1))
    into = torch.empty(N, requires_grad=True)
    operations = [
        dist.P2POp(dist.isend, theirs[rank].clone(), group=group, group_peer=1 - rank),
        dist.P2POp(dist.irecv, into, group=group, group_peer=1 - rank),
    ]
    works = dist.batch_isend_irecv(operations)
    del operations
    for work in works:
        work.wait()
    assert torch.equal(into.detach(), coded(theirs[1 - rank]))
    kind, said = fails(lambda: dist.recv(torch.empty(N), group=group))
    assert kind == "RuntimeError", said
    assert "must name its source" in said


@on_ranks(2)
def test_what_travels_as_it_is(rank: int, world_size: int) -> None:
    """To the bit: integers, small tensors, maxima, wide floats, and everything that is no
    activation, such as a parameter for a checkpoint."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(2)
    group = mesh.get_group()
    both = torch.randn(2, 4 * N, generator=torch.Generator().manual_seed(1))
    mine = both[rank]

    def reduced(t: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        t = t.clone()
        dist.all_reduce(t, op, group=group)
        return t

    with tagc.activations():
        assert torch.equal(reduced(mine, dist.ReduceOp.MAX), both.amax(0))
        assert torch.equal(reduced(mine[:100]), both[:, :100].sum(0))
        assert torch.equal(reduced(mine.double()), both.double().sum(0))
        assert torch.equal(reduced((mine * 100).long()), (both * 100).long().sum(0))
        assert not torch.equal(reduced(mine), both.sum(0))
    assert torch.equal(reduced(mine), both.sum(0))
    weight = both.view(-1, 64)
    assert torch.equal(distribute_tensor(weight, mesh, [Shard(0)]).full_tensor(), weight)


@on_ranks(2)
def test_what_is_not_finite_stays_visible(rank: int, world_size: int) -> None:
    group = mesh_of(2).get_group()
    t = torch.full((4 * N,), 127.0)
    if rank == 1:
        t[5], t[2 * N] = float("nan"), float("inf")
    with tagc.activations():
        dist.all_reduce(t, group=group)
    assert t[5].isnan()
    assert t[2 * N].isnan()
    assert torch.equal(t[64 : 2 * N - 64], torch.full((2 * N - 128,), 254.0))


@on_ranks(3)
def test_bytes(rank: int, world_size: int) -> None:
    """8 bits and a scale of 16 for 64 elements, in whole rows of 8 blocks."""
    names = ("ep",)
    group = mesh_of(3, names=names).get_group()
    rows = 6
    t = torch.randn(3 * rows * 512)
    before = bytes_by_dimension().get("ep")
    with tagc.activations():
        dist.all_reduce(t, group=group)
    sent = bytes_by_dimension()["ep"]
    wire = sent.wire_bytes - (before.wire_bytes if before else 0)
    dense = sent.dense_bytes - (before.dense_bytes if before else 0)
    assert wire == 2 * 2 * rows * 512 * 8.25 / 8
    assert dense == 2 * 2 * rows * 512 * 4


class Mlp(nn.Module):
    """A block of a tensor-parallel model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


def in_tensor_parallel(mesh: Any, sequence: bool) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

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
    from torch.utils.checkpoint import checkpoint

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
        assert (a - b).norm() < 0.02 * b.norm(), (a - b).norm() / b.norm()


@on_ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel(rank: int, world_size: int, sequence: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(2))
    plain = init_device_mesh("cpu", (2,), mesh_dim_names=("native",))
    native = gradients(in_tensor_parallel(plain, sequence), x)
    model = in_tensor_parallel(mesh_of(2), sequence)
    before = gradients(model, x)
    tagc.compress_activations(model)
    mine = gradients(model, x)
    near(mine, native)
    assert before[0] == native[0]  # only the backward was compressed
    again = gradients(model, x, again=True)
    assert torch.equal(mine[0], again[0])
    assert torch.equal(mine[1], again[1])


@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_a_compiled_model(rank: int, world_size: int) -> None:
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(2))
    model = tagc.compress_activations(in_tensor_parallel(mesh_of(2), True))
    eager = gradients(model, x)
    compiled: Any = torch.compile(model, backend="aot_eager")
    traced = gradients(compiled, x)
    assert torch.equal(eager[0], traced[0])
    assert torch.equal(eager[1], traced[1])


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_pipelines(rank: int, world_size: int, schedule: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    each = 2 if schedule == "Interleaved1F1B" else 1
    x, wanted = torch.randn(2, 4, 32, 64, generator=torch.Generator().manual_seed(2))

    def run(mesh: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        parts = [Mlp() for _ in range(2 * each)]
        group, cpu = mesh.get_group(), torch.device("cpu")
        stages = [
            PipelineStage(parts[i], i, 2 * each, cpu, group=group) for i in range(rank, 2 * each, 2)
        ]
        kind: Any = get_schedule_class(schedule)
        runs = kind(stages if each > 1 else stages[0], 2, loss_fn=nn.functional.mse_loss)
        losses: list[Tensor] = []
        if rank == 0:
            runs.step(x)
        else:
            runs.step(target=wanted, losses=losses)
        found = [p.grad.flatten() for s in stages for p in s.submod.parameters()]  # type: ignore[union-attr]
        return torch.stack([t.detach() for t in losses] or [torch.ones(())]), torch.cat(found)

    native = run(init_device_mesh("cpu", (2,), mesh_dim_names=("native",)))
    near(run(mesh_of(2, names=("pp",))), native)


@on_ranks(4)
def test_with_sharded_data_parallelism(rank: int, world_size: int) -> None:
    """FSDP2 over one dimension, tensor parallelism over the other, one policy for both."""
    from torch.distributed.fsdp import fully_shard

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

    kind, said = fails(lambda: tagc.wrap(made(), "hybrid"))
    assert kind == "PolicyError", said
    assert "says nothing for dimension 'tp'" in said, said
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
    tagc.compressor(model).remove()
    assert gradients(model, x)[0] == reference[0]  # only the backward is compressed


@on_ranks(2)
def test_refusals(rank: int, world_size: int) -> None:
    """Before any rank sends."""
    options = tagc.dimension_options(policy(), "tp")
    other = tagc.dimension_options(policy(bits=4), "tp")
    for make, kind, part in (
        (
            lambda: dist.new_group(backend="tagc", pg_options=options if rank else other),
            "RuntimeError",
            "the ranks of a group of backend 'tagc' differ",
        ),
        (lambda: dist.new_group(backend="tagc"), "ValueError", "needs to know how to compress"),
        (lambda: tagc.dimension_options("hybrid", "tp"), "PolicyError", "it has: none"),
        (
            lambda: tagc.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), policy="hybrid-3d"),
            "PolicyError",
            "rules for dimensions: tp, cp, pp, ep; the mesh has dp",
        ),
    ):
        found, said = fails(make)
        assert found == kind, said
        assert part in said, said
    mesh_of(2)
    mesh_of(2)
    kind, said = fails(lambda: mesh_of(2, bits=4))
    assert kind == "ValueError", said
    assert "torch cannot tell such meshes apart" in said


@on_ranks(2)
def test_switched_off(rank: int, world_size: int) -> None:
    with patch.dict("os.environ", TAGC_DISABLE="1"):
        group = mesh_of(2).get_group()
    both = torch.randn(2, 4 * N, generator=torch.Generator().manual_seed(1))
    t = both[rank].clone()
    with tagc.activations():
        dist.all_reduce(t, group=group)
    assert torch.equal(t, both.sum(0))
