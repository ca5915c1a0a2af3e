"""Parameters in FSDP2's all-gather: what every rank computes with, what it costs, and
``keep_for_backward``: gathered once a step, for its forward and backward."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from parity.model import loss_of
from parity.option import once
from support.block_net import net, recomputing, sharded, wrap
from support.distributed import fails, on_ranks
from support.exact import EXACT, equal
from support.gathering import INT8, KEPT, gathering, recorded
from support.small_net import local_grads, local_weights

DELTA = {"kind": "delta", "bits": 4, "block": 32}


# What a backward reads


def set_resharding(model: Any, resharding: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(resharding)


def staying_after_backward(model: Any, rank: int, step: int) -> None:
    """Micro-batches with ``set_reshard_after_backward(False)``, the last one with True."""
    for micro in range(3):
        model.set_reshard_after_backward(micro == 2)
        model.set_requires_gradient_sync(micro == 2)
        loss_of(model, rank, 3 * step + micro).backward()


def with_other_forwards(model: Any, rank: int, step: int) -> None:
    """The next backward must not see what an evaluation, or a forward without one, kept."""
    with torch.no_grad():
        loss_of(model, rank, 50)
    loss_of(model, rank, step).backward()
    loss_of(model, rank, 60)


def check_kept(rank: int, make: Any, backward: Any, steps: int = 3) -> None:
    """A kept message gives the bits of one that is sent again, and no old parameters; nor does a
    change."""
    weights = []
    for codec in (INT8, KEPT, DELTA):
        calls: list[Any] = []
        with recorded(calls):
            model = wrap(make(), gathering(codec))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            calls.clear()
            backward(model, rank, step)
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
    equal(weights[1], weights[0])


@on_ranks(2, timeout=200)
def test_kept_parameters(rank: int, world_size: int) -> None:
    check_kept(rank, recomputing, once, steps=2)
    for backward in (staying_after_backward, with_other_forwards):
        check_kept(rank, lambda: sharded(net()), backward, steps=2)


@on_ranks(2)
def test_a_forward_that_finds_its_parameters_gathered(rank: int, world_size: int) -> None:
    """With resharding off a backward gathers nothing, and the kept message outlives the step. A
    later forward may gather nothing either: its backward must not read that message."""

    def backward(model: Any, rank: int, step: int) -> None:
        set_resharding(model, False)
        if step:  # FSDP's first forward makes tensors
            with torch.no_grad():
                loss_of(model, rank, 50)
        set_resharding(model, step % 2 == 1)
        loss_of(model, rank, step).backward()

    check_kept(rank, lambda: sharded(net()), backward)


# Other forwards and writes between a forward and its backward


def with_others(model: Any, body: Any) -> None:
    """Run ``body`` with other weights in the model, then swap its own back in."""
    own = {name: p.detach().clone() for name, p in model.named_parameters()}

    def swap(weights: Any) -> None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.data.copy_(weights(name))

    swap(lambda name: own[name] * 3 + 0.1)
    body()
    swap(own.get)


@on_ranks(2)
def test_a_forward_that_autograd_does_not_record_changes_nothing(
    rank: int, world_size: int
) -> None:
    """A teacher, or an evaluation of averaged weights, between a forward and its backward."""

    def teach(model: Any) -> None:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a checkpoint that is not recorded
            loss_of(model, rank, 1)

    grads = []
    for codec in (INT8, KEPT):
        model = wrap(sharded(net(recompute="reentrant")), gathering(codec))
        loss = loss_of(model, rank, 0)
        with_others(model, lambda model=model: teach(model))
        loss.backward()
        grads.append(local_grads(model))
    torch.testing.assert_close(grads[1], grads[0], **EXACT)


@on_ranks(2)
def test_parameters_that_change_before_backward(rank: int, world_size: int) -> None:
    """FSDP would gather the new ones; a backward that sends nothing must not go on silently."""
    for codec, remedy in ((KEPT, "'keep_for_backward: false'"), (DELTA, "")):
        model = wrap(sharded(net()), gathering(codec))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        loss_of(model, rank, 0).backward()
        loss = loss_of(model, rank, 1)
        optimizer.step()
        kind, text = fails(loss.backward)
        assert kind == "RuntimeError", text
        assert "parameters of unit 'blocks.1' changed between a forward and its backward" in text
        assert remedy in text
    # Only one message is kept: of two recorded forwards it is the wrong one for the first.
    model = wrap(sharded(net()), gathering(KEPT))
    loss = loss_of(model, rank, 0)
    with_others(model, lambda: loss_of(model, rank, 1))
    kind, text = fails(loss.backward)
    assert (kind, "changed between a forward and its" in text) == ("RuntimeError", True), text
