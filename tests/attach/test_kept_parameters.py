"""``keep_for_backward``: parameters that are gathered once a step, for its forward and backward."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import tagc
from parity.model import loss_of
from parity.option import wrap_blocks
from support.block_net import RECOMPUTED, net, recomputing, sharded, wrap
from support.distributed import on_ranks
from support.exact import EXACT
from support.failing import fails
from support.gathering import INT8, KEPT, gathering, recorded
from support.marks import slow
from support.small_net import local_grads, local_weights


def check_kept(rank: int, make: Any, backward: Any) -> None:
    """A kept message gives the bits of one that is sent again, and no old parameters."""
    weights = []
    for codec in (INT8, KEPT):
        calls: list[Any] = []
        with recorded(calls):
            model = wrap(make(), gathering(codec))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            calls.clear()
            backward(model, step)
            # The parameters of this step, in every gather of it.
            outs: dict[int, Tensor] = {}
            for unit, _, _, out in calls:
                torch.testing.assert_close(out, outs.setdefault(id(unit), out), **EXACT)
            assert outs
            optimizer.step()
            optimizer.zero_grad()
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        weights.append(local_weights(model))
    torch.testing.assert_close(weights[1], weights[0], **EXACT)


@pytest.mark.some(2)
@on_ranks(2)
@pytest.mark.parametrize("how", RECOMPUTED)
def test_kept_parameters_with_checkpointing(rank: int, world_size: int, how: str) -> None:
    def make() -> Any:
        return recomputing(how)

    check_kept(rank, make, lambda model, step: loss_of(model, rank, step).backward())


@on_ranks(2)
def test_kept_parameters_of_units_called_twice(rank: int, world_size: int) -> None:
    check_kept(
        rank,
        lambda: sharded(net(times=2)),
        lambda model, step: loss_of(model, rank, step).backward(),
    )


@on_ranks(2)
def test_kept_parameters_that_stay_after_backward(rank: int, world_size: int) -> None:
    """Micro-batches with ``set_reshard_after_backward(False)``, the last one with True."""

    def backward(model: Any, step: int) -> None:
        for micro in range(3):
            model.set_reshard_after_backward(micro == 2)
            model.set_requires_gradient_sync(micro == 2)
            loss_of(model, rank, 3 * step + micro).backward()

    check_kept(rank, lambda: sharded(net()), backward)


@on_ranks(2)
def test_kept_parameters_after_forwards_without_backward(rank: int, world_size: int) -> None:
    """An evaluation, an optimizer's step, and the next backward must not see what the evaluation
    kept."""

    def backward(model: Any, step: int) -> None:
        with torch.no_grad():
            loss_of(model, rank, 50)
        loss_of(model, rank, step).backward()
        loss_of(model, rank, 60)  # a forward that nobody goes back through

    check_kept(rank, lambda: sharded(net()), backward)


def set_resharding(model: Any, resharding: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(resharding)


@pytest.mark.some(1)
@on_ranks(2)
@pytest.mark.parametrize("by", ["no_grad", "inference_mode", "unshard"])
def test_a_forward_that_finds_its_parameters_gathered(rank: int, world_size: int, by: str) -> None:
    """With resharding off a backward gathers nothing, and the kept message outlives the step. A
    later forward may gather nothing either: its backward must not read that message."""

    def backward(model: Any, step: int) -> None:
        set_resharding(model, False)
        if by == "unshard":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
        elif step:  # FSDP's first forward makes tensors, which training could not use
            with getattr(torch, by)():
                loss_of(model, rank, 50)
        set_resharding(model, step % 2 == 1)
        loss_of(model, rank, step).backward()

    check_kept(rank, lambda: sharded(net()), backward)


# Other forwards and writes between a forward and its backward


def with_others(model: Any, by_data: bool, body: Any) -> None:
    """Run ``body`` with other weights in the model, then swap its own back in."""
    own = {name: p.detach().clone() for name, p in model.named_parameters()}

    def swap(weights: Any) -> None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                (p.data if by_data else p).copy_(weights(name))

    swap(lambda name: own[name] * 3 + 0.1)
    body()
    swap(own.get)


@pytest.mark.some(2)
@on_ranks(4)
@pytest.mark.parametrize(
    ("how", "mode", "by_data"),
    [
        slow("plain", "no_grad", False),
        ("plain", "inference_mode", True),
        slow("inside", "no_grad", False),
        slow("inside", "no_grad", True),
        ("reentrant inside", "no_grad", True),
        ("wrapper", "inference_mode", False),
        ("halves", "no_grad", False),
        slow("halves", "no_grad", True),
    ],
)
def test_a_forward_that_autograd_does_not_record_changes_nothing(
    rank: int, world_size: int, how: str, mode: str, by_data: bool
) -> None:
    """A teacher, or an evaluation of averaged weights, between a forward and its backward; with
    checkpoints of all kinds, and parameters that are resharded to a smaller group."""

    def make() -> Any:
        model = net(recompute={"inside": True, "reentrant inside": "reentrant"}.get(how, False))
        if how == "wrapper":
            wrap_blocks(model)
        return sharded(model, reshard_after_forward=2 if how == "halves" else True)

    def teach(model: Any) -> None:
        with getattr(torch, mode)(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a checkpoint that is not recorded
            loss_of(model, rank, 1)

    grads = []
    for codec in (INT8, KEPT):
        model = wrap(make(), gathering(codec))
        loss = loss_of(model, rank, 0)
        with_others(model, by_data, lambda model=model: teach(model))
        loss.backward()
        grads.append(local_grads(model))
    torch.testing.assert_close(grads[1], grads[0], **EXACT)


@on_ranks(2)
@pytest.mark.parametrize("fused", [False, True])
def test_parameters_that_change_before_backward(rank: int, world_size: int, fused: bool) -> None:
    """FSDP would gather the new ones; a backward that sends nothing must not go on silently."""
    model = wrap(sharded(net()), gathering(KEPT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    loss_of(model, rank, 0).backward()
    loss = loss_of(model, rank, 1)
    optimizer.step()
    kind, said = fails(loss.backward)
    assert kind == "RuntimeError", said
    assert "the parameters of unit 'blocks.1' changed between a forward and its backward" in said
    assert "'keep_for_backward: false'" in said


@on_ranks(2)
def test_a_recorded_forward_with_other_weights(rank: int, world_size: int) -> None:
    """Only one message is kept: that it is the wrong one is seen."""
    model = wrap(sharded(net()), gathering(KEPT))
    loss = loss_of(model, rank, 0)
    with_others(model, True, lambda: loss_of(model, rank, 1))
    kind, said = fails(loss.backward)
    assert kind == "RuntimeError", said
    assert "changed between a forward and its backward" in said


# Roots


class Blocks(nn.Module):
    """Sharded blocks, and nothing above them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().sum()


@on_ranks(2)
def test_blocks_without_a_root_are_roots(rank: int, world_size: int) -> None:
    """FSDP gathers them once, so there is nothing to keep."""
    torch.manual_seed(1)
    model = Blocks()
    for block in model.blocks:
        fully_shard(block)
    calls: list[Any] = []
    with recorded(calls):
        wrap(model, gathering(KEPT))
    compressor = tagc.compressor(model)
    before = compressor.metrics().parameter_wire_bytes
    model(torch.randn(5, 24)).backward()
    assert len(calls) == 3
    plans = [gatherer.plan for gatherer in compressor.gatherers]
    assert [plan.info.per_step for plan in plans] == [1, 1, 1]
    assert not any(plan.reuses_forward_message for plan in plans)
    planned = sum(row.wire_bytes for row in compressor.plan().rows if row.direction == "parameters")
    assert compressor.metrics().parameter_wire_bytes - before == planned
