"""Codec ``exact``: training has the bits of FSDP's own gathers, whatever happens to parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import tagc
from support.block_net import wrap
from support.distributed import as_on_nccl, on_ranks
from support.gathering import KEPT, gathering
from support.small_net import local_weights, loss_of, net, sharded
from support.states import shipped
from tagc.plan.table import format_bytes

# Of the middle layers, with others unchanged, so that a unit has both; or of all parameters.
SOME = {"kind": "exact"}, ["*.[02].weight", "head.weight"]
ALL = {"kind": "exact"}, "*"
PACKED = {"kind": "exact", "keep_copy": False}, "*"


def made(dtype: torch.dtype, replicas: int = 1, **options: Any) -> Any:
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if replicas > 1:
        ranks = torch.distributed.get_world_size() // replicas
        options["mesh"] = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("r", "s"))
    return sharded(mp_policy=mixed, **options)


def life(model: Any, rank: int, compressor: Any) -> list[Tensor]:
    """Losses and parameters of a run with frozen parameters, micro-batches, a skipped step, weights
    that something else changed, a load and a forward that fails.

    The first gather after a step measures all units. Here it is one of only some of them, and all
    change again before the others are gathered."""
    for p in model.second[2].parameters():
        p.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = [
        torch.optim.AdamW([p for p in trained if (p.ndim == 2) == matrices], lr=0.01)
        for matrices in (True, False)
    ]
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(rank))
    found: list[Tensor] = []
    for step in range(6):
        for micro in range(1 + (step == 5)):
            loss = loss_of(model, rank, 10 * step + micro)
            loss.backward()
            found.append(loss.detach())
        if step != 1:
            optimizers[0].step()
        with torch.no_grad():
            found.append(model.first(x))
        reshard(model)
        if step == 2:  # everything is new, and some of it is extreme
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(-(2.0**8)).add_(3.0)
                    p.to_local().view(-1)[:1].fill_(1e-40)
                    p.mul_(2.0**-8)
                    if rank == 1:  # exponents that do not fit in packed messages
                        flat = p.to_local().view(-1)
                        flat.mul_(2.0 ** -(torch.arange(len(flat)) % 40))
            if compressor is not None:
                compressor.refresh()
        if step == 3 and compressor is not None:
            compressor.load_state_dict(compressor.state_dict())
        if step == 4:
            with failing(model.norm), pytest.raises(ZeroDivisionError):
                loss_of(model, rank, step)
            reshard(model)
        for optimizer in optimizers[step % 2 :]:
            optimizer.step()
        model.zero_grad()
    return [*found, *local_weights(model).values()]


def reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def failing(module: nn.Module) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    hook = module.register_forward_pre_hook(fail)
    yield
    hook.remove()


def same(ours: list[Tensor], native: list[Tensor]) -> None:
    for i, (mine, theirs) in enumerate(zip(ours, native, strict=True)):
        assert torch.equal(mine, theirs), f"number {i}"


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "what", "dtype", "hosts", "reshard", "changes"),
    [
        (2, SOME, torch.bfloat16, None, True, []),
        (4, ALL, torch.float16, 2, False, []),
        (2, PACKED, torch.bfloat16, None, True, []),
        (4, PACKED, torch.bfloat16, 2, True, ["*.0.weight", "norm.*"]),
    ],
)
@pytest.mark.parametrize("nccl", [False, True])
def test_a_run_has_native_bits(
    rank: int,
    world_size: int,
    what: Any,
    dtype: torch.dtype,
    hosts: Any,
    reshard: bool,
    changes: list[str],
    nccl: bool,
) -> None:
    native = life(made(dtype, reshard_after_forward=reshard), rank, None)
    model = made(dtype, reshard_after_forward=reshard)
    policy = gathering(*what)
    if changes:  # of some parameters of a unit
        policy["parameters"].insert(0, gathering(ALL[0], changes)["parameters"][0])
    with as_on_nccl() if nccl else nullcontext():
        wrap(model, policy, hosts=hosts, ops="cpu")
        same(life(model, rank, tagc.compressor(model)), native)
    assert tagc.compressor(model).metrics().parameter_error == 0  # of the last step's changes, too
    about = str(tagc.compressor(model).plan())
    assert ("'keep_copy: false' saves no memory here" in about) == bool(changes)


@on_ranks(4)
def test_each_group_of_ranks_agrees_on_its_own_sizes(rank: int, world_size: int) -> None:
    """With experts, whose units have other ranks; one of them is gathered first."""

    def experts() -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model: Any = net()
        fully_shard(model.first, mesh=mesh["expert"], mp_policy=mixed)
        for module in (model.second, model):
            fully_shard(module, mp_policy=mixed)
        return model

    native = life(experts(), rank, None)
    model = experts()
    wrap(model, gathering(*ALL), hosts=None, ops="cpu")
    same(life(model, rank, tagc.compressor(model)), native)


@on_ranks(2)
def test_what_changes_after_it_was_measured_is_an_error(rank: int, world_size: int) -> None:
    model = made(torch.bfloat16)
    wrap(model, gathering(*ALL), ops="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        loss_of(model, rank, step).backward()
        optimizer.step()
    with torch.no_grad():
        model.first(torch.ones(5, 7))
        for p in model.second.parameters():
            p.mul_(-3.0)  # does not fit
    with pytest.raises(RuntimeError, match=r"'second' changed, but not by an optim.*refresh\(\)"):
        loss_of(model, rank, 2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@on_ranks(timeout=1100)
@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize(
    ("world_size", "hosts", "replicas"), [(2, None, 1), (4, None, 1), (4, 2, 1), (4, None, 2)]
)
def test_a_long_run_with_kills_has_native_bits(
    rank: int, world_size: int, hosts: Any, replicas: int, muon: bool
) -> None:
    """The policy as it is shipped, but for weights of any size."""
    native = long_run(rank, replicas, muon, None, None)
    ours = long_run(rank, replicas, muon, shipped("exact"), hosts)
    for i, (mine, theirs) in enumerate(zip(ours, native, strict=True)):
        assert torch.equal(mine, theirs), f"number {i}"


def long_run(rank: int, replicas: int, muon: bool, policy: Any, hosts: Any) -> list[Tensor]:
    """Losses and parameters of 200 steps, in which all processes die twice if there is a policy:
    nothing of what a checkpoint leaves out remains."""
    model = made(torch.bfloat16, replicas)
    if policy is not None:
        wrap(model, policy, hosts=hosts)
    optimizers = optimizers_of(model, muon)
    found: list[Tensor] = []
    for step in range(200):
        if policy is not None and step in (67, 134):
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            states = [deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            saved = tagc.compressor(model).state_dict()
            model = made(torch.bfloat16, replicas)
            wrap(model, policy, hosts=hosts)
            model.load_state_dict(weights)
            tagc.compressor(model).load_state_dict(saved)
            optimizers = optimizers_of(model, muon)
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        loss = loss_of(model, rank, step)
        loss.backward()
        found.append(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *local_weights(model).values()]


def optimizers_of(model: nn.Module, muon: bool) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for the matrices, and AdamW for the rest. Over replicas Muon refuses matrices
    with fewer rows than ranks."""
    matrices = [p for p in model.parameters() if muon and p.ndim == 2 and p.shape[0] > 4]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=1e-3)]
    return [torch.optim.Muon(matrices, lr=1e-3), *found] if muon else found


@on_ranks(2)
def test_bytes_follow_the_changes(rank: int, world_size: int) -> None:
    """Next to nothing if no parameter changes, few bits if they move little, and hardly more than
    the parameters if all are new."""
    torch.manual_seed(3)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model: Any = fully_shard(nn.Linear(256, 256, bias=False), mp_policy=mixed)
    wrap(model, gathering(*ALL), ops="cpu")
    compressor = tagc.compressor(model)
    assert math.isnan(compressor.metrics().parameter_bits)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    bits = []

    def change(of: Any) -> None:
        before = compressor.parameter_wire_bytes
        with torch.no_grad():
            of(model.weight.to_local())
        sgd.step()
        model(torch.ones(1, 256)).sum().backward()
        model.zero_grad()
        sent = compressor.parameter_wire_bytes - before
        bits.append(8 * sent / (256 * 256 / 2))
        metrics = compressor.metrics()
        assert metrics.parameter_bits == bits[-1]
        assert f"; {bits[-1]:.2f} bits a parameter in the last gather" in str(metrics)

    change(lambda x: None)
    bits.clear()
    for of in (
        lambda x: None, lambda x: x[:8].add_(1e-4), lambda x: x.add_(1e-4),
        lambda x: x.copy_(torch.randn(128, 256).exp2_()),
        lambda x: x.copy_(random_bits(torch.Generator().manual_seed(rank))),
    ):  # fmt: skip
        change(of)
    nothing, few, all_a_little, new, any_bits = bits
    assert nothing < 0.1
    assert few < 1
    assert all_a_little < 6
    assert 8 < new <= any_bits
    assert any_bits == 16 + 32 / (128 * 256)  # ranks agree by a number of 4 bytes


@on_ranks()
@pytest.mark.parametrize(("world_size", "hosts"), [(2, None), (4, 2)])
def test_bytes_of_packed_exponents(rank: int, world_size: int, hosts: Any) -> None:
    """As planned if the exponents of all ranks fit, otherwise those of FSDP."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model: Any = fully_shard(nn.Linear(256, 256, bias=False), mp_policy=mixed)
    wrap(model, gathering(*PACKED), ops="cpu", hosts=hosts)
    compressor = tagc.compressor(model)
    plan, shard = compressor.plan(), model.weight.to_local().detach()
    planned, uncompressed = plan.sent["parameters"]
    assert 12.25 <= 8 * planned / shard.numel() < 12.4  # to one rank, in both cases
    most = format_bytes(uncompressed)
    assert f"parameters: expected {format_bytes(planned)} per step; at most {most}" in str(plan)
    for at, sent in (None, planned), (1, uncompressed), (None, planned):
        before = compressor.parameter_wire_bytes
        with torch.no_grad():
            if rank == at:
                shard.copy_(random_bits(torch.Generator().manual_seed(1))[: len(shard)])
            else:
                shard.normal_()
            model(torch.ones(1, 256))
        gathered = model.weight.detach().view(torch.uint8)
        rows = shard.bfloat16().view(torch.uint8)
        native = [torch.empty_like(rows) for _ in range(world_size)]
        torch.distributed.all_gather(native, rows)
        assert torch.equal(gathered, torch.cat(native))
        model.reshard()
        assert compressor.parameter_wire_bytes - before == sent + 4
    with pytest.raises(RuntimeError, match="a CUDA graph cannot hold the parameters of unit"):
        compressor.before_capture()


@on_ranks(2)
def test_parameters_that_are_too_few_to_pack(rank: int, world_size: int) -> None:
    """They take the bytes that FSDP sends, and ranks need not agree."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model: Any = fully_shard(nn.Linear(4, 4), mp_policy=mixed)
    wrap(model, gathering(*PACKED), ops="cpu")
    model(torch.ones(1, 4))
    compressor = tagc.compressor(model)
    metrics, (planned, uncompressed) = compressor.metrics(), compressor.plan().sent["parameters"]
    sent = metrics.parameter_wire_bytes
    assert 0 < sent == metrics.parameter_dense_bytes == planned == uncompressed


@on_ranks(2)
def test_what_packed_exponents_refuse(rank: int, world_size: int) -> None:
    float16 = made(torch.float16)
    with pytest.raises(ValueError, match="float16, whose exponents leave nothing to pack"):
        wrap(float16, gathering(*PACKED))
    several = net()
    several.norm.bfloat16()
    with pytest.raises(ValueError, match="has parameters of several dtypes, which FSDP gathers"):
        wrap(fully_shard(several), gathering(*PACKED))
    kept = gathering(*PACKED)
    kept["parameters"].insert(0, gathering(KEPT, "*.0.weight")["parameters"][0])
    with pytest.raises(ValueError, match="set 'keep_for_backward: false' or 'keep_copy: true'"):
        wrap(made(torch.bfloat16), kept)


def random_bits(generator: torch.Generator) -> Tensor:
    patterns = torch.randint(-(1 << 15), 1 << 15, (128, 256), generator=generator)
    return patterns.to(torch.int16).view(torch.bfloat16).float()
