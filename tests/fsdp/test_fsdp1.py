"""FSDP1 with compressed gradients, on 1 to 4 ranks, against FSDP1 itself and its flat layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)

import tagc
from support.counting import counted_bytes
from support.distributed import on_ranks
from support.exact import EXACT
from support.fsdp1_net import (
    CPU,
    FSDP,
    UNITS,
    clean,
    flat_of,
    local_grads,
    local_weights,
    nested,
    quietly,
    sharded,
    train,
)
from support.small_net import EVERYTHING, loss_of, net
from support.units import gathered, policy
from tagc.flat import FlatRows
from tagc.pieces import pieces
from tagc.reducer import UnitReducer

SUM = dist.ReduceOp.SUM
BF16 = torch.bfloat16
WEIGHTS = policy(({"name": "*.weight"}, 0.3))


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


@on_ranks(2, 3)
@pytest.mark.parametrize("option", OPTIONS)
def test_dense_is_native(rank: int, world_size: int, option: str) -> None:
    native, wrapped = (sharded(**OPTIONS[option]) for _ in range(2))
    with as_on_an_accelerator():
        tagc.wrap(wrapped, "dense")
        torch.testing.assert_close(train(wrapped, rank, 3), train(native, rank, 3), **EXACT)
    torch.testing.assert_close(local_weights(wrapped), local_weights(native), **EXACT)
    metrics = tagc.compressor(wrapped).metrics()
    assert metrics.steps == 3
    assert metrics.wire_bytes == metrics.dense_bytes > 0


@on_ranks(2, 3)
@pytest.mark.parametrize("option", [o for o in OPTIONS if OPTIONS[o]["use_orig_params"]])
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


@on_ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [False, True])
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


@on_ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [False, True])
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


@contextmanager
def recorded() -> Iterator[list[tuple[UnitReducer, Tensor, Tensor, Tensor, Tensor]]]:
    """Notes the units' inputs and outputs, in FSDP's columns and in the plan's."""
    calls: list[tuple[UnitReducer, Tensor, Tensor, Tensor, Tensor]] = []
    reduce, take, give = UnitReducer.reduce, FlatRows.take, FlatRows.give
    inside: list[Tensor] = []

    def recorded_reduce(self: UnitReducer, out: Tensor, inp: Tensor, *rest: Any) -> None:
        before = inp.clone()
        inside.clear()
        reduce(self, out.fill_(torch.nan), inp, *rest)
        rows, shard = inside or (before, out.clone())
        calls.append((self, before, out.clone(), rows, shard))

    def recorded_take(self: FlatRows, grad: Tensor) -> Tensor:
        workspace = self._workspace.take("flat_grad", (len(grad), self._columns), grad.dtype)
        workspace.fill_(torch.nan)
        rows = take(self, grad)
        inside.append(rows.clone())
        return rows

    def recorded_give(self: FlatRows, shard: Tensor, out: Tensor, row: int) -> None:
        inside.append(shard.clone())
        give(self, shard, out, row)

    with (
        patch.object(UnitReducer, "reduce", recorded_reduce),
        patch.object(FlatRows, "take", recorded_take),
        patch.object(FlatRows, "give", recorded_give),
    ):
        yield calls


def check_layout(calls: list, grads: dict[str, Tensor], rank: int, use_orig_params: bool) -> None:
    """All that a unit is handed is this rank's own gradient, element by element, and all that it
    returns goes where FSDP1 has it."""
    world_size = dist.get_world_size()
    assert sorted(reducer.plan.info.name for reducer, *_ in calls) == sorted(UNITS)
    for reducer, inp, out, rows, shard in calls:
        buffer, owners = flat_of(reducer.plan.info.name, grads, world_size, use_orig_params)
        # Unaligned views may take other kernels than the parameters of the model alone.
        torch.testing.assert_close(inp, buffer, **(EXACT if use_orig_params else {}))
        S = len(buffer) // world_size
        by_row = [owners[row * S : (row + 1) * S] for row in range(world_size)]
        expected = torch.zeros(S)
        for segment in reducer.plan.segments:
            names = {param.name for param in segment.params}
            for row, theirs in enumerate(by_row):
                mask = torch.tensor([owner in names for owner in theirs])
                mine = inp.view(world_size, S)[row][mask]
                handed = rows.view(world_size, -1)[row, segment.start : segment.stop]
                torch.testing.assert_close(handed[: len(mine)], mine, **EXACT)
                assert not handed[len(mine) :].any()
                if row == rank:
                    expected[mask] = shard[segment.start : segment.start + len(mine)]
        torch.testing.assert_close(out, expected, **EXACT)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_segments_are_handed_their_parameters(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    alone = net()
    model = quietly(tagc.wrap, sharded(use_orig_params=use_orig_params), WEIGHTS)
    plan = tagc.compressor(model).plan()
    (second,) = (unit for unit in plan.units if unit.info.name == "second")
    assert [segment.role for segment in second.segments] == ["other", "other"]
    straddling = [piece for piece in pieces(second.info, second.info.params) if piece.offset > 0]
    assert straddling
    loss_of(alone, rank, 0).backward()
    with recorded() as calls:
        loss_of(model, rank, 0).backward()
    grads = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    check_layout(calls, grads, rank, use_orig_params)
    assert {row.param for row in plan.rows} == set(grads)
    assert {row.shape for row in plan.rows} == {tuple(grad.shape) for grad in grads.values()}


@on_ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_one_rule_for_a_unit_takes_the_buffer_itself(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    model = quietly(tagc.wrap, sharded(use_orig_params=use_orig_params), EVERYTHING)
    for reducer in tagc.compressor(model)._installed.reducers:
        assert reducer._flat is None
        (segment,) = reducer.plan.segments
        assert segment.columns == reducer.plan.buffer_columns
        for piece in pieces(reducer.plan.info, segment.params):
            assert piece.column == piece.start
    loss_of(model, rank, 0).backward()


@on_ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_accumulation(rank: int, world_size: int, use_orig_params: bool) -> None:
    """In ``no_sync`` micro-batches are reduced once; without it, each on its own."""
    alone = net()
    model = quietly(tagc.wrap, sharded(use_orig_params=use_orig_params), WEIGHTS)
    for step in range(2):
        alone.zero_grad()
        model.zero_grad()
        for micro in range(3):
            with recorded() as calls, nullcontext() if micro == 2 else model.no_sync():
                loss_of(alone, rank, 3 * step + micro).backward()
                loss_of(model, rank, 3 * step + micro).backward()
            assert bool(calls) == (micro == 2)
        grads = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        check_layout(calls, grads, rank, use_orig_params)
        assert tagc.compressor(model).metrics().steps == step + 1

    native, dense = (sharded(use_orig_params=use_orig_params) for _ in range(2))
    tagc.wrap(dense, "dense")
    for micro in range(3):
        for model in (native, dense):
            loss_of(model, rank, micro).backward()
    torch.testing.assert_close(local_grads(dense), local_grads(native), **EXACT)
    assert tagc.compressor(dense).metrics().steps == 3


@on_ranks(2, 3)
def test_wire_bytes(rank: int, world_size: int) -> None:
    """Counted by the metrics, by the plan and from the tensors that collectives get; dense bytes
    are those of FSDP1's own buffer."""
    model = quietly(tagc.wrap, sharded(), policy(({"name": "second.*.weight"}, 0.2)))
    compressor = tagc.compressor(model)
    loss_of(model, rank, 0).backward()
    before = compressor.metrics()
    with counted_bytes() as handed:
        loss_of(model, rank, 1).backward()
    after = compressor.metrics()
    buffers = [
        flat_of(unit, dict(net().named_parameters()), world_size, False)[0].numel()
        for unit in UNITS
    ]
    dense = sum(4 * n // world_size * (world_size - 1) for n in buffers)
    rows = compressor.plan().rows
    assert after.dense_bytes - before.dense_bytes == dense
    assert sum(row.dense_bytes for row in rows) == pytest.approx(dense, rel=1e-12)
    wire = after.wire_bytes - before.wire_bytes
    assert wire == sum(handed)
    # What a rank sends depends on what the others own; the plan has the average.
    average = gathered(torch.tensor([wire])).double().mean().item()
    assert average == pytest.approx(sum(row.wire_bytes for row in rows), rel=1e-12)


# Of each row: whether it has any of `second.0.weight`, and its elements of the others.
OWNED = {
    3: ((True, 0), (True, 237), (False, 410)),
    4: ((True, 0), (True, 33), (False, 308), (False, 306)),
}


@on_ranks(3, 4)
def test_owners_get_what_they_own(rank: int, world_size: int) -> None:
    """Half of a unit in 8 bits, the other as it is; some rows have nothing of the one or other."""
    rule = {
        "when": {"name": "second.0.weight"},
        "codec": {"kind": "quantized", "bits": 8, "block": 32},
    }
    model = quietly(tagc.wrap, sharded(), {"schema": 1, "gradients": [rule]})
    loss_of(model, rank, 0).backward()
    (reducer,) = (r for r in tagc.compressor(model)._installed.reducers if r.plan.compressed)
    quantized = reducer.plan.compressed[0].codec.words
    words = sum(has * quantized + dense for has, dense in OWNED[world_size])
    sent = gathered(torch.tensor([reducer.wire_bytes])).sum().item()
    assert sent == 4 * (world_size - 1) * words
    assert words < 0.75 * world_size * reducer.plan.words


# Parameters


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


# What is refused


def refusal(model: nn.Module, chosen: Any = EVERYTHING, **options: Any) -> tuple[str, str]:
    """The type and message of what `tagc.wrap` raises; the model is as it was."""
    before = [m._comm_hook for m in FSDP.fsdp_modules(model)]
    try:
        tagc.wrap(model, chosen, **options)
    except Exception as error:
        assert [m._comm_hook for m in FSDP.fsdp_modules(model)] == before
        assert not hasattr(model, "_tagc_compressor")
        return type(error).__name__, str(error)
    return "", "nothing was raised"


@on_ranks(2)
def test_what_fsdp1_cannot_do(rank: int, world_size: int) -> None:
    model = sharded()
    kind, said = refusal(model, "hybrid")
    assert kind == "PolicyError"
    assert "whose all-gather cannot be replaced; take a policy for gradients only" in said
    kind, said = refusal(model, "dense", replicas=dist.group.WORLD)
    assert kind == "PolicyError"
    assert "averages over replicas for FSDP2 only" in said
    rule = {"when": {"name": "*"}, "codec": {"kind": "quantized", "bits": 8}}
    kind, said = refusal(model, {"schema": 1, "gradients": [rule], "replicas": [rule]})
    assert kind == "PolicyError"
    assert "averages over replicas for FSDP2 only" in said
    kind, said = refusal(model, policy(({"name": "no.such"}, 0.3)))
    assert kind == "PolicyError"
    assert "compresses nothing" in said
    native = sharded()
    torch.testing.assert_close(train(model, rank, 1), train(native, rank, 1), **EXACT)


@on_ranks(4)
def test_replicated(rank: int, world_size: int) -> None:
    with pytest.warns(FutureWarning, match="NO_SHARD"):
        model = FSDP(net(), device_id=CPU, sharding_strategy=ShardingStrategy.NO_SHARD)
    kind, said = refusal(model)
    assert kind == "ValueError"
    assert "replicated, not sharded (NO_SHARD)" in said
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    model = FSDP(net(), device_id=CPU, device_mesh=mesh, sharding_strategy=strategy)
    kind, said = refusal(model)
    assert kind == "ValueError"
    assert "sharded and replicated (HYBRID_SHARD)" in said
    assert 'replicas=mesh["replicate"]' in said


def own_hook(state: Any, grad: Tensor, shard: Tensor) -> None: ...


@on_ranks(2)
def test_hooks_of_others(rank: int, world_size: int) -> None:
    model = sharded()
    model.register_comm_hook(None, own_hook)
    kind, said = refusal(model)
    assert kind == "ValueError"
    assert "has a communication hook of its own (own_hook" in said

    model = quietly(tagc.wrap, sharded(), EVERYTHING)
    kind, said = refusal(model.second)
    assert kind == "ValueError"
    assert "'second' is" not in said
    assert "already wrapped, by itself or as a part of another model" in said


@on_ranks(2)
def test_parts_of_a_model(rank: int, world_size: int) -> None:
    model = sharded()
    loss_of(model, rank, 0).backward()
    kind, said = refusal(model.second)
    assert kind == "ValueError"
    assert "part of a larger FSDP1 model" in said

    both: Any = nn.Sequential(FSDP(nn.Linear(4, 4), device_id=CPU), nn.Linear(4, 4))
    fully_shard(both[1])
    kind, said = refusal(both)
    assert kind == "ValueError"
    assert "partly by FSDP1" in said


@on_ranks(2)
def test_ranks_that_disagree(rank: int, world_size: int) -> None:
    kind, said = refusal(sharded(), WEIGHTS if rank else EVERYTHING)
    assert kind == "RuntimeError"
    assert "differs between ranks" in said


@on_ranks(2)
def test_thawed_parameters_are_refused(rank: int, world_size: int) -> None:
    """They have no place in the plan: an error in the backward, not a gradient lost."""
    model = sharded(use_orig_params=True)
    weight = next(p for name, p in model.named_parameters() if clean(name) == "second.0.weight")
    weight.requires_grad_(False)
    quietly(tagc.wrap, model, WEIGHTS)
    loss_of(model, rank, 0).backward()
    weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'second' was frozen when tagc\.wrap was called"):
        loss_of(model, rank, 1).backward()
