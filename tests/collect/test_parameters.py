"""Parameters in FSDP2's all-gather: what every rank computes with, and what it costs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import tagc
from support.distributed import on_ranks
from support.exact import EXACT
from support.gathering import INT8, KEPT, gathering, recorded
from support.small_net import local_weights, loss_of, net, sharded, train
from support.units import gathered

BF16 = {"kind": "dense", "wire": "bfloat16"}


def wrapped(codec: dict[str, Any], **options: Any) -> Any:
    with warnings.catch_warnings():
        # Units as small as these may well cost more compressed.
        warnings.simplefilter("ignore")
        return tagc.wrap(sharded(**options), gathering(codec))


@pytest.mark.some(3)
@on_ranks(2, 3)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_get_every_shard_rounded_to_its_blocks(
    rank: int, world_size: int, bits: int, dtype: torch.dtype
) -> None:
    calls: list[Any] = []
    mixed = MixedPrecisionPolicy(param_dtype=dtype)
    with recorded(calls):
        model = wrapped(INT8 | {"bits": bits}, mp_policy=mixed)
        with torch.no_grad():
            model(torch.zeros(2, 7, dtype=dtype))
    changed = 0
    levels = 2 ** (bits - 1) - 1
    for unit, _, inp, out in calls:
        everywhere = gathered(out)
        torch.testing.assert_close(everywhere[0], everywhere[rank], **EXACT)
        shards = gathered(inp)
        rows = out.view(world_size, -1)
        for segment in unit.plan.segments:
            span = slice(segment.start, segment.stop)
            if not segment.compressed:
                torch.testing.assert_close(rows[:, span], shards[:, span], **EXACT)
                continue
            changed += int((rows[:, span] != shards[:, span]).sum())
            for row, shard in zip(rows[:, span].double(), shards[:, span].double(), strict=True):
                for at in range(0, shard.numel(), 32):
                    part = shard[at : at + 32]
                    # Half a step; the scale is rounded to 8 bits, the value to the dtype.
                    step = part.abs().max() / levels * (1 + 2**-8)
                    clipped = part.abs().max() * 2**-8
                    rounding = part.abs() * (2**-8 if dtype == torch.bfloat16 else 2**-24)
                    error = (row[at : at + 32] - part).abs()
                    assert (error <= step / 2 + clipped + rounding).all()
    assert changed


@on_ranks(2)
def test_the_forward_computes_with_the_rounded_parameters(rank: int, world_size: int) -> None:
    model, alone = wrapped(INT8), net()
    x = torch.randn(5, 7)
    with torch.no_grad():
        got = model(x)
        model.unshard()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        rounded = {name: p.detach().clone() for name, p in model.named_parameters()}
        alone.load_state_dict(rounded)
        torch.testing.assert_close(got, alone(x))
        exact = dict(net().named_parameters())
        assert any(not torch.equal(exact[name], rounded[name]) for name in exact)
        assert torch.equal(exact["first.0.bias"], rounded["first.0.bias"])


@pytest.mark.some(2)
@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kept_message_changes_bytes_and_nothing_else(
    rank: int, world_size: int, dtype: torch.dtype
) -> None:
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    twice, once = wrapped(INT8, mp_policy=mixed), wrapped(KEPT, mp_policy=mixed)

    def steps(model: Any) -> list[dict[str, Tensor]]:
        if dtype == torch.float32:
            return train(model, rank, 4)
        loss_of_bf16 = model(torch.ones(3, 7, dtype=dtype)).sum()
        loss_of_bf16.backward()
        return [local_weights(model)]

    torch.testing.assert_close(steps(once), steps(twice), **EXACT)
    torch.testing.assert_close(local_weights(once), local_weights(twice), **EXACT)
    for model in (twice, once):
        plan, metrics = tagc.compressor(model).plan(), tagc.compressor(model).metrics()
        rows = [row for row in plan.rows if row.direction == "parameters"]
        times = 4 if dtype == torch.float32 else 1
        assert metrics.parameter_wire_bytes == pytest.approx(
            times * sum(r.wire_bytes for r in rows)
        )
        assert metrics.parameter_dense_bytes == times * sum(r.dense_bytes for r in rows)
    kept, sent = (tagc.compressor(m).metrics().parameter_wire_bytes for m in (once, twice))
    assert kept < sent
    assert sum(row.stored_bytes for row in tagc.compressor(once).plan().rows) > 0


@on_ranks(2)
def test_a_kept_message_serves_one_backward(rank: int, world_size: int) -> None:
    """Two forwards, then two backwards: the second has to gather for itself, as natively."""
    calls: list[Any] = []
    with recorded(calls):
        model = wrapped(KEPT)
        losses = [loss_of(model, rank, step) for step in range(2)]
        sent = tagc.compressor(model).parameter_wire_bytes
        losses[0].backward()
        assert tagc.compressor(model).parameter_wire_bytes == sent
        losses[1].backward()
        assert tagc.compressor(model).parameter_wire_bytes > sent
    for unit in {id(c[0]): c[0] for c in calls}.values():
        outs = [c[3] for c in calls if c[0] is unit]
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], **EXACT)


@on_ranks(2)
def test_evaluation_between_steps_is_harmless(rank: int, world_size: int) -> None:
    model, other = wrapped(KEPT), wrapped(KEPT)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, other)]
    for step in range(3):
        for m, optimizer in zip((model, other), optimizers, strict=True):
            loss_of(m, rank, step).backward()
            if m is other:
                with torch.no_grad():
                    loss_of(m, rank, 100)
            optimizer.step()
            optimizer.zero_grad()
            if m is other:
                with torch.no_grad():
                    loss_of(m, rank, 200)
                m.reshard()  # FSDP's root keeps its parameters after a forward
    torch.testing.assert_close(local_weights(model), local_weights(other), **EXACT)


@on_ranks(4)
def test_a_smaller_backward_group_gathers_natively(rank: int, world_size: int) -> None:
    model = wrapped(INT8, reshard_after_forward=2)
    train(model, rank, 2)
    metrics = tagc.compressor(model).metrics()
    assert 0 < metrics.parameter_wire_bytes < metrics.parameter_dense_bytes


@on_ranks(2)
def test_removal_restores_fsdps_gather(rank: int, world_size: int) -> None:
    model, native = wrapped(INT8), sharded()
    tagc.compressor(model).remove()
    torch.testing.assert_close(train(model, rank, 2), train(native, rank, 2), **EXACT)


@on_ranks(2)
def test_the_error_is_measured(rank: int, world_size: int) -> None:
    errors = {}
    for bits in (4, 8):
        model = wrapped(INT8 | {"bits": bits})
        errors[bits] = tagc.compressor(model).metrics().parameter_error
    # A step is 1/7 or 1/127 of the largest of 32, so the error about 1/20 or 1/400.
    assert 0.02 < errors[4] < 0.1
    assert 0.001 < errors[8] < 0.006
    assert tagc.compressor(wrapped(BF16)).metrics().parameter_error < 2**-8


@on_ranks(2)
def test_a_parameter_that_is_not_finite_is_seen_everywhere(rank: int, world_size: int) -> None:
    model = wrapped(INT8)
    if rank == 1:
        weight: Any = model.second[0].weight
        with torch.no_grad():
            weight.to_local()[0, 0] = float("inf")
    with torch.no_grad():
        assert model(torch.ones(2, 7)).isnan().any()


def test_a_small_model_is_not_wrapped_by_mistake() -> None:
    with pytest.raises(ValueError, match="not sharded"):
        tagc.wrap(nn.Linear(3, 3), gathering(INT8))
