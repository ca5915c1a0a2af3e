"""FSDP1 with compressed gradients, on 1 to 4 ranks, against FSDP1 itself and its flat layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)

import tagc
from support.distributed import on_ranks
from support.exact import EXACT
from support.fsdp1_net import (
    CPU,
    FSDP,
    UNITS,
    WEIGHTS,
    clean,
    local_grads,
    local_weights,
    nested,
    quietly,
    sharded,
    train,
)
from support.fsdp1_recording import recorded
from support.marks import covering
from support.small_net import EVERYTHING, loss_of, net
from support.units import gathered, policy

SUM = dist.ReduceOp.SUM
BF16 = torch.bfloat16


# FSDP1's own results


OPTIONS: dict[str, dict[str, Any]] = {
    "flat": {"use_orig_params": False},
    "original": {"use_orig_params": True},
    "grad_op": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "flat grad_op": {"use_orig_params": False, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "bfloat16": {
        "use_orig_params": True,
        "mixed_precision": MixedPrecision(param_dtype=BF16, cast_forward_inputs=True),
    },
    "reduced in float32": {
        "use_orig_params": False,
        "mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32),
    },
    "reduced in bfloat16, kept": {
        "use_orig_params": True,
        "mixed_precision": MixedPrecision(reduce_dtype=BF16, keep_low_precision_grads=True),
    },
    "offload": {"use_orig_params": True, "cpu_offload": CPUOffload(offload_params=True)},
}


@contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """What FSDP1 offloads to the CPU it pins, and waits for, which torch cannot do without one."""
    with (
        patch.object(Tensor, "pin_memory", lambda self: self),
        patch.object(torch.cpu.Stream, "synchronize", lambda self: None, create=True),
    ):
        yield


@pytest.mark.some(3)
@on_ranks()
@pytest.mark.parametrize(("world_size", "option"), covering((2, 3), OPTIONS))
def test_dense_is_native(rank: int, world_size: int, option: str) -> None:
    native, wrapped = (sharded(**OPTIONS[option]) for _ in range(2))
    with as_on_an_accelerator():
        tagc.wrap(wrapped, "dense")
        torch.testing.assert_close(train(wrapped, rank, 3), train(native, rank, 3), **EXACT)
    torch.testing.assert_close(local_weights(wrapped), local_weights(native), **EXACT)
    metrics = tagc.compressor(wrapped).metrics()
    assert metrics.steps == 3
    assert metrics.wire_bytes == metrics.dense_bytes > 0


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "option"),
    covering((2, 3), [o for o in OPTIONS if OPTIONS[o]["use_orig_params"]]),
)
def test_unselected_parameters_are_native(rank: int, world_size: int, option: str) -> None:
    """In a unit that also has compressed ones, whose buffer is rearranged."""
    native, wrapped = (sharded(**OPTIONS[option]) for _ in range(2))
    with as_on_an_accelerator():
        quietly(tagc.wrap, wrapped, policy(({"name": "second.0.weight"}, 0.1)))
        ((_, mine),), ((_, theirs),) = train(wrapped, rank, 1), train(native, rank, 1)
    one, other = mine.pop("second.0.weight"), theirs.pop("second.0.weight")
    assert (one is None) == (other is None)
    assert one is None or not torch.equal(one, other)
    # Two numbers add to the same sum in either order; more need not, where columns moved.
    wide: Any = {"rtol": 0.05, "atol": 0.1} if "bfloat16" in option else {}
    bound = EXACT if world_size == 2 else wide
    torch.testing.assert_close(mine, theirs, **bound)


@on_ranks()
@pytest.mark.parametrize(("world_size", "use_orig_params"), covering((2, 3), (False, True)))
def test_warm_up_is_native(rank: int, world_size: int, use_orig_params: bool) -> None:
    native, wrapped = (sharded(use_orig_params=use_orig_params) for _ in range(2))
    codec = {"kind": "sketch", "density": 0.3, "warmup_steps": 2}
    rules = {"schema": 1, "gradients": [{"when": {"name": "*.weight"}, "codec": codec}]}
    quietly(tagc.wrap, wrapped, rules)
    ours, theirs = train(wrapped, rank, 3), train(native, rank, 3)
    torch.testing.assert_close(ours[:2], theirs[:2], **EXACT)
    assert not all_equal(ours[2], theirs[2])


def all_equal(ours: Any, theirs: Any) -> bool:
    try:
        torch.testing.assert_close(ours, theirs, **EXACT)
    except AssertionError:
        return False
    return True


@on_ranks()
@pytest.mark.parametrize(("world_size", "use_orig_params"), covering((2, 3), (False, True)))
def test_clipping(rank: int, world_size: int, use_orig_params: bool) -> None:
    native, wrapped = (sharded(use_orig_params=use_orig_params) for _ in range(2))
    tagc.wrap(wrapped, "dense")
    ours = train(wrapped, rank, 3, clip=0.5)
    torch.testing.assert_close(ours, train(native, rank, 3, clip=0.5), **EXACT)
    assert all(norm > 0.5 for norm, _ in ours)
    # The norm that FSDP1 takes of compressed gradients is that of all shards.
    tagc.compressor(wrapped).remove()
    quietly(tagc.wrap, wrapped, WEIGHTS)
    loss_of(wrapped, rank, 0).backward()
    squares = sum(g.double().square().sum() for g in local_grads(wrapped).values() if g is not None)
    assert isinstance(squares, Tensor)
    norm = gathered(squares).sum().sqrt()
    torch.testing.assert_close(wrapped.clip_grad_norm_(0.5).double(), norm, rtol=1e-5, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_remove_gives_native_back(rank: int, world_size: int, use_orig_params: bool) -> None:
    native, wrapped = (sharded(use_orig_params=use_orig_params) for _ in range(2))
    quietly(tagc.wrap, wrapped, EVERYTHING)
    loss_of(wrapped, rank, 0).backward()
    wrapped.zero_grad()
    tagc.compressor(wrapped).remove()
    with pytest.raises(ValueError, match="not wrapped"):
        tagc.compressor(wrapped)
    torch.testing.assert_close(train(wrapped, rank, 3), train(native, rank, 3), **EXACT)

    # After many forwards as before the first one.
    quietly(tagc.wrap, wrapped, EVERYTHING)
    ours, theirs = train(wrapped, rank, 1), train(native, rank, 1)
    assert tagc.compressor(wrapped).metrics().steps == 1
    assert not all_equal(ours, theirs)


@on_ranks(1)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_one_rank_warns_and_changes_nothing(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    with pytest.warns(UserWarning, match="switching to use `NO_SHARD`"):
        native, wrapped = (sharded(use_orig_params=use_orig_params) for _ in range(2))
    with pytest.warns(UserWarning, match="does nothing at world size 1"):
        assert tagc.wrap(wrapped, EVERYTHING) is wrapped
    torch.testing.assert_close(train(wrapped, rank, 2), train(native, rank, 2), **EXACT)
    assert tagc.compressor(wrapped).metrics().wire_bytes == 0
    tagc.compressor(wrapped).remove()


@on_ranks(2, 3)
def test_frozen_parameters_are_not_sent(rank: int, world_size: int) -> None:
    frozen = ("second.0.weight", "norm.bias")

    def partly_frozen() -> Any:
        model = sharded(use_orig_params=True)
        for name, param in model.named_parameters():
            param.requires_grad_(clean(name) not in frozen)
        return model

    native, dense, compressed = (partly_frozen() for _ in range(3))
    tagc.wrap(dense, "dense")
    torch.testing.assert_close(train(dense, rank, 2), train(native, rank, 2), **EXACT)

    rule = {"when": {"name": "*"}, "codec": {"kind": "dense", "wire": "bfloat16"}}
    quietly(tagc.wrap, compressed, {"schema": 1, "gradients": [rule]})
    with recorded() as calls:
        ours, theirs = train(compressed, rank, 1), train(partly_frozen(), rank, 1)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.05)
    plan = tagc.compressor(compressed).plan()
    assert not {row.param for row in plan.rows} & set(frozen)
    elements = {name: p.numel() for name, p in net().named_parameters()}
    for reducer, _, out, _, _ in calls:
        assert not out.isnan().any()
        sent = gathered(torch.tensor([reducer.wire_bytes])).sum().item() / (world_size - 1)
        names = [name for name in UNITS[reducer.plan.info.name] if name not in frozen]
        padding = 2 * 3 * len(names) + 2 * world_size  # alignment, and halves of words
        if set(names) < set(UNITS[reducer.plan.info.name]):
            padding = 2 * world_size
        assert 0 <= sent - 2 * sum(elements[name] for name in names) <= padding


@on_ranks(2)
def test_names_are_the_users(rank: int, world_size: int) -> None:
    """Without what FSDP1 and checkpointing put into them."""
    model = nested(lambda m: FSDP(checkpoint_wrapper(m), device_id=CPU))
    quietly(tagc.wrap, model, policy(({"name": "second.2.weight"}, 0.3)))
    plan = tagc.compressor(model).plan()
    assert {row.param for row in plan.rows} == {name for name, _ in net().named_parameters()}
    assert {unit.info.name for unit in plan.units} == set(UNITS)
    assert [row.param for row in plan.rows if row.codec != "dense"] == ["second.2.weight"]
    loss_of(model, rank, 0).backward()
    assert tagc.compressor(model).metrics().steps == 1


@on_ranks(2)
def test_several_roots_in_a_plain_module(rank: int, world_size: int) -> None:
    def two_roots() -> Any:
        model: Any = net()
        for name in ("first", "second", "norm", "head"):
            setattr(model, name, FSDP(getattr(model, name), device_id=CPU, use_orig_params=True))
        return model

    native, wrapped = two_roots(), two_roots()
    tagc.wrap(wrapped, "dense")
    torch.testing.assert_close(train(wrapped, rank, 2), train(native, rank, 2), **EXACT)
    assert tagc.compressor(wrapped).metrics().steps == 2
    tagc.compressor(wrapped).remove()
    assert all(module._comm_hook is None for module in FSDP.fsdp_modules(wrapped))
