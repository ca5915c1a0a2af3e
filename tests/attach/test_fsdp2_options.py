"""FSDP2's options where comparing sums with native FSDP says too little; see `parity` for all
of them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import tagc
from parity.fsdp2_options import in_two_meshes
from parity.meshes import two_by_two
from parity.model import loss_of
from parity.option import compile_blocks, wrap_blocks
from support.block_net import WEIGHTS, net, sharded, wrap
from support.distributed import on_ranks
from support.exact import EXACT
from support.failing import fails
from support.gathering import INT8, gathering
from support.own_gather import gather_themselves
from support.small_net import local, local_grads, local_weights
from tagc.attach.fsdp2 import param_dtype, param_groups_of, reduce_dtype
from tagc.attach.fsdp2_collectives import _params_of
from tagc.policy import Policy

EXACT_SKETCH = {
    "schema": 1,
    "gradients": [
        {
            "when": {"name": "*.weight"},
            "codec": {"kind": "sketch", "density": 1.0, "symbol": "int32x1"},
        }
    ],
}


def steps(model: Any, rank: int, count: int = 3) -> dict[str, Tensor]:
    """Weights after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(count):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return local_weights(model)


# Gradients


@on_ranks(2, 3)
def test_clipping_sees_the_gradients_that_tagc_hands_out(rank: int, world_size: int) -> None:
    model = wrap(sharded(net()))
    loss_of(model, rank, 0).backward()
    before = local_grads(model)
    square = sum((g.double().square().sum() for g in before.values()), torch.zeros(()).double())
    dist.all_reduce(square)
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert norm.full_tensor().item() == pytest.approx(square.sqrt().item(), rel=1e-5)
    for name, grad in local_grads(model).items():
        torch.testing.assert_close(grad, before[name] * (0.01 / norm.full_tensor()))


@on_ranks(2)
def test_an_optimizer_in_backward(rank: int, world_size: int) -> None:
    """FSDP calls the hooks with the gradient that tagc hands out."""
    together, alone = wrap(sharded(net())), wrap(sharded(net()))
    for p in together.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def step(p: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    for number in range(3):
        loss_of(together, rank, number).backward()
    torch.testing.assert_close(local_weights(together), steps(alone, rank), **EXACT)


@on_ranks(2, 3)
def test_wrappers_do_not_show_in_names(rank: int, world_size: int) -> None:
    """A policy is about the model, whoever recomputes or compiles parts of it."""
    plain, wrapped = net(), net()
    wrap_blocks(wrapped)
    wrapped.head = torch.compile(wrapped.head, backend="eager")
    rows = [
        [row.param for row in tagc.compressor(wrap(sharded(m))).plan().rows]
        for m in (plain, wrapped)
    ]
    assert rows[0] == rows[1]
    assert "blocks.1.down.weight" in rows[1]
    units = tagc.compressor(wrapped).plan().units
    assert [unit.info.name for unit in units] == ["", "blocks.0", "blocks.1"]


@on_ranks(2)
def test_checkpointed_and_compiled_blocks_train_as_plain_ones(rank: int, world_size: int) -> None:
    results = []
    for kind in ("plain", "inside", "wrapper", "compiled"):
        model = net(recompute=kind == "inside")
        if kind == "wrapper":
            wrap_blocks(model)
        if kind == "compiled":
            compile_blocks(model)
        weights = steps(wrap(sharded(model)), rank)
        results.append(
            {n.replace("_checkpoint_wrapped_module.", ""): w for n, w in weights.items()}
        )
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], **EXACT)


@pytest.mark.slow
@on_ranks(2, timeout=220)
def test_blocks_compiled_by_inductor(rank: int, world_size: int) -> None:
    warnings.simplefilter("ignore")  # importing inductor has much to say

    def compiled() -> Any:
        model = net()
        compile_blocks(model, "inductor")
        return sharded(model)

    native = steps(compiled(), rank)
    torch.testing.assert_close(steps(wrap(compiled(), "dense"), rank), native, **EXACT)
    eager = steps(wrap(sharded(net()), EXACT_SKETCH), rank)
    weights = steps(wrap(compiled(), EXACT_SKETCH), rank)
    torch.testing.assert_close(weights, eager, rtol=1e-4, atol=1e-5)


@on_ranks(2, 3)
def test_unused_parameters_have_no_gradient(rank: int, world_size: int) -> None:
    """And all others have what they have natively."""
    model, native = wrap(sharded(net(extra=True)), EXACT_SKETCH), sharded(net(extra=True))
    for m in (model, native):
        loss_of(m, rank, 0).backward()
    grads: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, grad in grads.items() if grad is None] == ["extra.weight", "extra.bias"]
    for name, p in native.named_parameters():
        theirs: Any = p.grad
        if theirs is not None:
            mine = grads[name].to_local()
            torch.testing.assert_close(mine, theirs.to_local(), rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_this_torch_tells_what_a_backward_reached(rank: int, world_size: int) -> None:
    """It does not by design: the list is a variable of its `foreach_reduce`."""
    model = sharded(net(extra=True))
    seen = []
    with mock.patch("tagc.attach.fsdp2_collectives._params_of", side_effect=_params_of) as look:
        wrap(model, EXACT_SKETCH)
        loss_of(model, rank, 0).backward()
    for call in look.call_args_list:
        frame = call.args[0]
        seen.append(frame.f_code.co_name)
    assert set(seen) == {"foreach_reduce"}
    # For its input and its output, in three units.
    assert len(seen) == 6


@on_ranks(3)
def test_ranks_that_use_different_parameters_are_told(rank: int, world_size: int) -> None:
    """Natively that hangs, or mixes up what it reduces."""
    model = wrap(sharded(net(extra=True)), EXACT_SKETCH)
    with pytest.raises(RuntimeError, match="parameters that only some of them use"):
        loss_of(model, rank, 0, take_extra=rank == 1).backward()


@on_ranks(3)
def test_the_remedy_serves_ranks_that_use_different_parameters(rank: int, world_size: int) -> None:
    """Sums of gradients, for rank 1 alone uses them; nothing is lost by the others' zeros."""
    model, native = wrap(sharded(net(extra=True)), EXACT_SKETCH), sharded(net(extra=True))
    for m in (model, native):
        m.set_reduce_scatter_unused_params(True)
        loss_of(m, rank, 0, take_extra=rank == 1).backward()
    mine, theirs = local_grads(model), local_grads(native)
    assert theirs["extra.weight"].any()
    for name, grad in mine.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_one_dtype_that_cannot_be_compressed(rank: int, world_size: int) -> None:
    model = net()
    model.blocks[1].double()
    model = sharded(model)
    with pytest.raises(tagc.PolicyError) as caught:
        wrap(model)
    said = str(caught.value)
    assert "unit 'blocks.1' reduces gradients of torch.float64" in said
    assert "MixedPrecisionPolicy(reduce_dtype=torch.float32)" in said
    assert "blocks.1.up.weight" in said

    spared = {"when": {"name": "blocks.0.*.weight"}, "codec": {"kind": "quantized", "bits": 4}}
    wrap(model, {"schema": 1, "gradients": [spared]})

    parameters = gathering(INT8, "blocks.1.*.weight")
    with pytest.raises(
        tagc.PolicyError, match=r"gathers parameters of torch\.float64.*param_dtype"
    ):
        wrap(sharded(net().double()), parameters)


@on_ranks(2)
def test_auto_leaves_what_cannot_be_compressed(rank: int, world_size: int) -> None:
    model = net()
    model.blocks[1].double()
    automatic = {"when": {"name": "*.weight"}, "codec": {"kind": "auto"}}
    wrap(sharded(model), {"schema": 1, "gradients": [automatic]})
    rows = tagc.compressor(model).plan().rows
    assert {row.codec for row in rows if row.unit == "blocks.1"} == {"dense"}


# Replicas


@on_ranks(4)
def test_micro_batches_that_replicas_do_not_share_are_not_sent(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    rules = {**WEIGHTS, "replicas": WEIGHTS["gradients"]}
    model = wrap(sharded(net(), mesh=mesh["shard"]), rules, replicas=mesh["replicate"])
    sent = [0]
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        loss_of(model, rank, micro).backward()
        sent.append(tagc.compressor(model).metrics().replica_wire_bytes)
        assert any(bool(g.any()) for g in local_grads(model).values()) == (micro == 2)
    assert sent[:3] == [0, 0, 0]
    assert sent[3] > 0


# Refusals


@on_ranks(1)
def test_one_rank(rank: int, world_size: int) -> None:
    model = sharded(net())
    with pytest.warns(UserWarning, match="does nothing at world size 1"):
        tagc.wrap(model, Policy.load(WEIGHTS))
    torch.testing.assert_close(steps(model, rank), steps(sharded(net()), rank), **EXACT)


@on_ranks(2)
def test_removal_lets_go_of_scratch_buffers(rank: int, world_size: int) -> None:
    from tagc.ops import cpu

    model = wrap(sharded(net()), gathering(INT8), ops="cpu")
    released: list[str] = []
    original = cpu.release
    cpu.release = lambda: released.append("") or original()
    try:
        tagc.compressor(model).remove()
    finally:
        cpu.release = original
    # Of three units, whose gradients are dense and need no operators.
    assert len(released) == 3


# Several meshes in a module


@on_ranks(4)
def test_every_parameter_group_is_a_unit(rank: int, world_size: int) -> None:
    """As experts on their own mesh; `tests/parity` has their sums. Removal leaves nothing."""
    model = net()
    in_two_meshes(model)
    native = [group_comms(group) for m in model.modules() for group in param_groups_of(m)]
    codec = {"kind": "quantized", "bits": 8, "block": 32}
    rule = {"when": {"name": "*"}, "codec": codec, "feedback": {"kind": "residual"}}
    rules = gathering(INT8, "*") | {"gradients": [rule]}
    wrap(model, rules)
    compressor = tagc.compressor(model)
    plan = compressor.plan()
    sizes = {unit.info.name: unit.info.world_size for unit in plan.units}
    assert sizes["blocks.0"] != sizes["blocks.0 (group 2)"]
    assert all(unit.compressed for unit in (*plan.units, *plan.parameters))
    loss_of(model, rank, 0).backward()
    assert all(part.wire_bytes for part in (*compressor.reducers, *compressor.gatherers))
    # A state taken here continues elsewhere to the bit.
    state, weights = compressor.state_dict(), local_weights(model)
    other = net()
    in_two_meshes(other)
    wrap(other, rules)
    for name, p in other.named_parameters():
        local(p).detach().copy_(weights[name])
    tagc.compressor(other).load_state_dict(state)
    for each in (model, other):
        each.zero_grad()
        loss_of(each, rank, 1).backward()
    torch.testing.assert_close(local_grads(other), local_grads(model), **EXACT)
    compressor.remove()
    assert native == [group_comms(group) for m in model.modules() for group in param_groups_of(m)]


def group_comms(group: Any) -> tuple[Any, ...]:
    return group._reduce_scatter_comm, group._all_gather_comm, group._all_reduce_hook


@on_ranks(4)
def test_replicas_that_shard_a_unit(rank: int, world_size: int) -> None:
    """Averaged, their shards would be mixed up without a word."""
    model = net()
    in_two_meshes(model)
    kind, said = fails(lambda: wrap(model, replicas=two_by_two()["replicate"]))
    assert kind == "ValueError"
    assert "is sharded over ranks that replicas=... says are replicas of each other" in said


@on_ranks(2)
def test_parameters_with_an_all_gather_of_their_own_keep_it(rank: int, world_size: int) -> None:
    """Others are compressed, and the plan says why these are not."""
    model = net()
    gather_themselves(model.blocks[:1])
    sharded(model)
    wrap(model, gathering(INT8, "*.weight"))
    compressor = tagc.compressor(model)
    by_name = {unit.info.name: unit for unit in compressor.plan().parameters}
    assert not by_name["blocks.0"].compressed
    assert by_name["blocks.1"].compressed
    said = str(compressor.plan())
    assert "parameters of blocks.0: as FSDP sends them, since parameters of type InBfloat16" in said
    loss_of(model, rank, 0).backward()
    sent = [gatherer.wire_bytes for gatherer in compressor.gatherers]
    assert all(sent)
    assert 0 < compressor.metrics().parameter_error < 0.01


def test_dtypes_where_each_parameter_has_a_policy() -> None:
    """As from torch 2.15 on, whose reductions are in the gradients' dtype if no other is asked for;
    before, a group has one policy, and reduces in the dtype of its parameters."""

    def param(grad: torch.dtype | None, *, trains: bool = True, **policy: Any) -> SimpleNamespace:
        sharded_param = SimpleNamespace(requires_grad=trains, dtype=torch.float32)
        mixed = MixedPrecisionPolicy(**policy)
        return SimpleNamespace(
            sharded_param=sharded_param, mp_policy=mixed, sharded_grad_dtype=grad
        )

    half: dict[str, Any] = {"param_dtype": torch.bfloat16}
    one = param(torch.float32, **half)
    frozen = param(torch.bfloat16, trains=False)
    group = SimpleNamespace(fsdp_params=[frozen, one])
    assert reduce_dtype("unit", group) == torch.float32
    assert param_dtype(one, group) == torch.bfloat16
    assert param_dtype(frozen, group) is None
    group.mp_policy = one.mp_policy
    assert reduce_dtype("unit", group) == torch.bfloat16
    assert param_dtype(frozen, group) == torch.bfloat16

    asked = param(torch.float32, reduce_dtype=torch.float16, **half)
    assert reduce_dtype("unit", SimpleNamespace(fsdp_params=[asked])) == torch.float16
    for other in (torch.bfloat16, None):
        several = SimpleNamespace(fsdp_params=[one, param(other)])
        with pytest.raises(ValueError, match=r"of 'unit' have several dtypes.*fully_shard on"):
            reduce_dtype("unit", several)
